"""The packages whose checkpoints are opened, one room each.

Every room has the same plan: `source.py` is the subclass of `Format`, `tables.py` or `families.py` the rows that map
names, `pixels.py` its preprocessing, and data files the architectures that it knows by name.
"""
