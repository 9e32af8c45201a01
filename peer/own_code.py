"""Loads what a user wrote and named as `package.module:name`, from the working directory or the installed packages."""

import importlib
import sys
from pathlib import Path


class OwnCodeError(ValueError):
    """What was named cannot be had; the text says why."""


def load(path: str) -> object:
    """The object of that name. Raises `OwnCodeError`, whatever goes wrong in the user's module."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise OwnCodeError("one of your own is written package.module:name, such as mine:TinyNet.")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise OwnCodeError(
            f"importing {module_name} raised {type(error).__name__}: {error}. Python looked in the working "
            f"directory {directory} and among the installed packages."
        ) from error
    if not hasattr(module, attribute):
        raise OwnCodeError(f"the module {module_name} ({module.__file__}) has no {attribute}.")
    found: object = getattr(module, attribute)
    return found
