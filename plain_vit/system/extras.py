"""Imports of optional packages, with an error that names the extra to install."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MissingPackageError, told


@contextmanager
def needs(*packages: str, script: bool = False) -> Iterator[None]:
    """Context for importing optional packages; a failed import becomes an error that says what to install.

    Args:
        packages: Requirements that provide all imports of the block, such as "plain-vit[train]".
        script: Exit the program with just the message, for use in scripts.

    Raises:
        MissingPackageError: A package is missing, or lacks what is imported from it.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "plain_vit":
            raise
        explained = MissingPackageError(_fault(error), packages)
        if not script:
            raise explained from error
        print(told(explained), file=sys.stderr)
        raise SystemExit(explained.exit_code) from error


def _fault(error: ImportError) -> str:
    if isinstance(error, MissingPackageError):
        return error.fault
    package = (error.name or "").partition(".")[0]
    if package and _is_absent(package):
        return f"the package {package} is not installed"
    return f"an import failed ({error})"


def _is_absent(package: str) -> bool:
    """Return whether there is no such package; a folder of its name without `__init__.py` does not count."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module inserted into sys.modules
        return False
    return found is None or found.origin is None
