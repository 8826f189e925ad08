"""Import objects that the config names by dotted path: agent loops, rewards, tools, trainer workers."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from async_rl.errors import ConfigError, EnvironmentNotReady


def load_object(path: str, *, what: str) -> Any:
    """Import the object at a dotted path.

    The current directory is searched too, so a file beside the config can be named by its stem.

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


def _import_module(module_name: str, path: str, what: str) -> ModuleType:
    # The sys.path of a console script starts with the script's folder, not the user's.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{what} {path!r}: there is no module {error.name!r}; expected an installed package or a "
                f"file in {os.getcwd()}"
            ) from error
        raise ConfigError(f"{what} {path!r}: importing {module_name!r} failed: {error}") from error
    except EnvironmentNotReady:  # its message already says what to install
        raise
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{what} {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
