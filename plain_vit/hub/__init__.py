"""Sending a model to the Hub: what a model's repository needs, searched first, in one commit."""

from .delivery import Push
from .push import check_repository, push_folder, push_saved, save_and_push

__all__ = ["Push", "check_repository", "push_folder", "push_saved", "save_and_push"]
