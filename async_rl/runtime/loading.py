"""Import objects that the config names by dotted path: agent loops, rewards, tools, trainer workers."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from async_rl.errors import ConfigError, EnvironmentNotReady

IMPORT_FOLDERS: Final[list[str]] = []
"""Folders that this process searches for the user's modules after the current one."""


def add_import_folder(folder: Path) -> None:
    """Search a folder for modules from now on, after `sys.path` and the current folder."""
    if (name := str(folder.resolve())) not in IMPORT_FOLDERS:
        IMPORT_FOLDERS.append(name)


def extend_import_path() -> str:
    """Append the folders of the user's modules to `sys.path`; return where they may be, for messages.

    The folder of the config may hold any file, so it comes last and shadows no package.
    """
    # The sys.path of a console script starts with the script's folder, not the user's.
    folders = [os.getcwd(), *(folder for folder in IMPORT_FOLDERS if folder != os.getcwd())]
    for folder in folders:
        if folder not in sys.path and not (folder == folders[0] and "" in sys.path):
            sys.path.append(folder)
    return f"an installed package or a file in {' or '.join(folders)}"


def load_object(path: str, *, what: str) -> Any:
    """Import the object at a dotted path.

    The current folder is searched too, and then the config's, so a file beside the config can be named by
    its stem.

    Args:
        path: `module:attribute`, for example `my_loop:MyLoop`; the attribute may have dots.
        what: What the object is, for the message: "agent loop".

    Raises:
        ConfigError: The path is malformed, the module is missing or fails to import, or it has no such
            attribute.
        EnvironmentNotReady: The module raises it because a package is not installed.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(f"{what} {path!r} is not a dotted path; expected `module:attribute`")
    value: Any = _import_module(module_name, path, what)
    for name in attribute.split("."):
        if not hasattr(value, name):
            close = difflib.get_close_matches(name, dir(value), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{what} {path!r}: module {module_name!r} has no attribute {attribute!r}{hint}")
        value = getattr(value, name)
    return value


def call_problem(function: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return why a function's signature does not accept a call, or None if it does or has no signature.

    Example:
        >>> call_problem(lambda task: 0.0, "task", "completion")
        'too many positional arguments'
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _import_module(module_name: str, path: str, what: str) -> ModuleType:
    places = extend_import_path()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{what} {path!r}: there is no module {error.name!r}; expected {places}"
            ) from error
        raise ConfigError(f"{what} {path!r}: importing {module_name!r} failed: {error}") from error
    except EnvironmentNotReady:  # its message already says what to install
        raise
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{what} {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
