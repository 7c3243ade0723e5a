"""Weight files, safely read and atomically written, independent of any model."""
