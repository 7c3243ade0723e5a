"""Image datasets, decoding, sampling, augmentation and streaming for training."""

from .datasets import (
    EMBEDDED,
    ImageClassificationData,
    find_columns,
    load_classification_data,
    load_digits,
    load_glyphs,
    load_images,
    load_labelled_split,
    load_splits,
    without_unreadable,
)

__all__ = [
    "EMBEDDED",
    "ImageClassificationData",
    "find_columns",
    "load_classification_data",
    "load_digits",
    "load_glyphs",
    "load_images",
    "load_labelled_split",
    "load_splits",
    "without_unreadable",
]
