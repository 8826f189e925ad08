"""Functions of the loss by name: the built-in ones, and the user's by their dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from async_rl.errors import ConfigError
from async_rl.runtime.loading import load_object

F = TypeVar("F", bound=Callable[..., Any])


def load_function(key: str, name: str, known: Mapping[str, F], args: Mapping[str, Any]) -> F:
    """Return the function that a setting names.

    Args:
        key: The setting, for messages.
        name: A name of a built-in function, or the dotted path of another one.
        known: The built-in functions by name.
        args: Keyword arguments of a function that is not built in.

    Raises:
        ConfigError: The dotted path cannot be loaded, leads to something that cannot be called, or to a
            built-in function, whose settings are checked by its name.
    """
    if name in known:
        return known[name]
    function = load_object(name, what=key)
    if not callable(function):
        raise ConfigError(f"{key}: {name} is {type(function).__name__}, expected a function")
    for built_in, its_function in known.items():
        if function is its_function:
            raise ConfigError(
                f"{key}: {name} is the built-in {built_in}, whose settings are checked by this name: set "
                f"{key}={built_in}"
            )
    return partial(function, **args)  # type: ignore[return-value]
