"""The packages whose checkpoints open, one subpackage each.

They are laid out alike: `source.py` has the subclass of `Format`, `tables.py` or `families.py` the conversion tables,
`pixels.py` the preprocessing, and the data files the package's named architectures.
"""
