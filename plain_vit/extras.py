"""Packages that plain-vit does not install by itself: asked for where they are imported, in one line if missing."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plain_vit.errors import MissingPackageError


@contextmanager
def needs(*packages: str, script: bool = False) -> Iterator[None]:
    """Import what may not be installed within this block, and whoever lacks it reads what to install.

    Args:
        packages: What brings everything that the block imports, as pip reads it: "plain-vit[train]".
        script: Leave the program with the message alone, as a script does that was started.

    Raises:
        MissingPackageError: A package is missing, or is too old or too new to have what is imported from it.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "plain_vit":
            raise
        explained = MissingPackageError(_fault(error), packages)
        if not script:
            raise explained from error
        print(f"{Path(sys.argv[0]).name}: {explained}", file=sys.stderr)
        raise SystemExit(explained.exit_code) from error


def _fault(error: ImportError) -> str:
    if isinstance(error, MissingPackageError):
        return error.fault
    package = (error.name or "").partition(".")[0]
    if package and _is_absent(package):
        return f"the package {package} is not installed"
    return f"an import failed ({error})"


def _is_absent(package: str) -> bool:
    """Tell whether there is no such package; a folder of its name without `__init__.py` is none."""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module that was put into sys.modules by hand
        return False
    return found is None or found.origin is None
