"""Pages on which the images of a run are looked through."""

from .page import DatasetOptions, WrittenPage, write_page

__all__ = ["DatasetOptions", "WrittenPage", "write_page"]
