"""Pages for browsing the images of a run."""

from .page import DatasetOptions, WrittenPage, write_page

__all__ = ["DatasetOptions", "WrittenPage", "write_page"]
