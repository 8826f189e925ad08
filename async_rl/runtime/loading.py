"""Import objects that the config names by dotted path: agent loops, rewards, tools, trainer workers."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final

from async_rl.errors import ConfigError, EnvironmentNotReady

IMPORT_FOLDERS: Final[list[str]] = []
"""Folders that this process searches for the user's modules after the current one."""


class _InstalledFirst:
    """Finds installed modules before the user's files of their names.

    The finder of `sys.path` prefers any file to an installed namespace package, such as `megatron`, and is
    asked before the finders of editable installs.
    """

    behind: ClassVar[list[str]] = []
    """The user's folders in `sys.path`."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is that is in no package; others are looked for in theirs."""
        installed = [entry for entry in sys.path if entry not in cls.behind]
        return PathFinder.find_spec(name, installed) if path is None else None


def add_import_folder(folder: Path) -> None:
    """Search a folder for modules from now on, after `sys.path` and the current folder."""
    if (name := str(folder.resolve())) not in IMPORT_FOLDERS:
        IMPORT_FOLDERS.append(name)


def extend_import_path() -> str:
    """Append the folders of the user's modules to `sys.path`; return where they may be, for messages.

    The folder of the config may hold any file, so it comes last and shadows no package.
    """
    if _InstalledFirst not in sys.meta_path:
        sys.meta_path[:] = sorted([_InstalledFirst, *sys.meta_path], key=(_InstalledFirst, PathFinder).count)
    # The sys.path of a console script starts with the script's folder, not the user's.
    folders = _user_folders()
    for folder in folders:
        if folder not in sys.path and not (folder == folders[0] and "" in sys.path):
            sys.path.append(folder)
            _InstalledFirst.behind.append(folder)
    return f"an installed package or a file in {' or '.join(folders)}"


def describe_shadowed(path: str) -> str | None:
    """Return that a module which a dotted path names is not the user's file of that name, if there is one."""
    extend_import_path()
    name = path.partition(":")[0].partition(".")[0]
    spec = None
    with suppress(ValueError):  # a module without a spec, such as __main__
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        return None
    found = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    for folder in _user_folders():
        for file in (Path(folder, f"{name}.py"), Path(folder, name, "__init__.py")):
            if file.is_file() and not (found is not None and Path(found).exists() and file.samefile(found)):
                return f"{name!r} is {found or 'a part of Python'}, and not {file}: rename the file"
            if file.is_file():
                return None
    return None


def _user_folders() -> list[str]:
    return [os.getcwd(), *(folder for folder in IMPORT_FOLDERS if folder != os.getcwd())]


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
            shadowed = describe_shadowed(path)
            hint += f"; {shadowed}" if shadowed else ""
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
            shadowed = describe_shadowed(path)
            raise ConfigError(
                f"{what} {path!r}: there is no module {error.name!r}; expected {places}"
                + (f"; {shadowed}" if shadowed else "")
            ) from error
        raise ConfigError(f"{what} {path!r}: importing {module_name!r} failed: {error}") from error
    except EnvironmentNotReady:  # its message already says what to install
        raise
    except (Exception, SystemExit) as error:  # a user's module may do anything while it is imported
        raise ConfigError(
            f"{what} {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
