"""Pushing models to the Hub: the files of a model repository, scanned for secrets, in one commit."""

from .delivery import Push
from .push import check_repository, push_folder, push_saved, save_and_push

__all__ = ["Push", "check_repository", "push_folder", "push_saved", "save_and_push"]
