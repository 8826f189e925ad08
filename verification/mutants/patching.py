"""What a mutant is, and how it replaces a function of the program."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_OURS = ("async_rl", "agent_loops", "trainer")


class Mutant(NamedTuple):
    """One function that breaks a promise."""

    name: str
    breaks: str
    """The fault, in one sentence."""
    target: str
    """The function: `package.module:function` or `package.module:Class.method`."""
    replacement: Callable[..., Any]
    """Gets the original function, then its arguments."""
    promise: str
    """The test file of a row of CONTRIBUTING.md's table."""
    tests: tuple[str, ...]
    """The narrowest test files or tests that must fail, as pytest takes them."""


def find_target(target: str) -> tuple[Any, str, Any]:
    """Return the owner of a function (module or class), its name there, and what stands there.

    Raises:
        LookupError: There is no such function.
    """
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    found = vars(owner).get(name) if owner is not None else None
    if found is None:
        raise LookupError(f"{target} does not exist: name what has its meaning now")
    return owner, name, found


def apply_mutant(mutant: Mutant, reached: Callable[[], None]) -> None:
    """Replace the function of a mutant everywhere; `reached` is called with each call of what replaces it."""
    owner, name, found = find_target(mutant.target)
    if isinstance(found, property):
        assert found.fget is not None
        setattr(owner, name, property(_noticed(mutant.replacement, found.fget, reached)))
    elif isinstance(found, staticmethod | classmethod):
        kind = type(found)
        setattr(owner, name, kind(_noticed(mutant.replacement, found.__func__, reached)))
    else:
        new = _noticed(mutant.replacement, found, reached)
        setattr(owner, name, new)
        if not isinstance(owner, type):  # other modules may have imported it already
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").partition(".")[0] in _OURS and module is not owner:
                    for alias, value in list(vars(module).items()):
                        if value is found:
                            setattr(module, alias, new)


def _noticed(new: Callable[..., Any], old: Callable[..., Any], reached: Callable[[], None]) -> Any:
    signature = inspect.signature(new)

    @functools.wraps(old)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        signature.bind(old, *args, **kwargs)  # a mutant that cannot be called is no fault of the program
        reached()
        return new(old, *args, **kwargs)

    return replaced
