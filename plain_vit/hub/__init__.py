"""Pushing models to the Hub: the files of a model repository, scanned for secrets and uploaded in one commit."""

from .delivery import Push
from .push import check_repository, push, push_folder

__all__ = ["Push", "check_repository", "push", "push_folder"]
