"""Lets the program ignore one setting, so that tests can show which of them notice.

The program then reads the default, whatever the config says. Tests and their builders still read what the
config says, and so do its checks and what displays it: a setting that is only checked or shown has no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from async_rl.config import Config
from async_rl.config.base import Strict

_PROGRAM: Final = ("async_rl", "trainer", "agent_loops", "verification")
"""The packages that ignore the setting: the product, and the simulated engines, trainer and checker."""

_SHOWING: Final = ("async_rl.config.description", "async_rl.config.reference")
"""The modules that only show what a config says."""

_CHECKING: Final = "async_rl.config.root"
"""The module whose functions check the settings against each other when a config is loaded."""

_INSTEAD: Final = "ignored"
"""What the program reads of a setting that has no default."""


def sections_of_settings() -> dict[str, list[type[Strict]]]:
    """Return the classes that hold each setting, by its dotted key, as docs/reference/config.md writes it.

    Sections of several kinds share settings: `engine.stall_s` is in two classes.
    """
    found: dict[str, list[type[Strict]]] = {}
    for key, section in _walk(Config, ""):
        found.setdefault(key, []).append(section)
    return found


def ignore_setting(key: str) -> None:
    """Let the program ignore a setting, in this process and its forks, for good."""
    for section in sections_of_settings()[key]:
        _ignore_field(section, key.rpartition(".")[2])


def _ignore_field(section: type[Strict], name: str) -> None:
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    elif default is msgspec.NODEFAULT:
        default = _INSTEAD
    real: Any = getattr(section, name)

    def read(self: Strict) -> Any:
        here = inspect.currentframe()
        if type(self) is section and here and here.f_back and _is_program(here.f_back):
            return default
        return real.__get__(self)

    setattr(section, name, property(read))


def _is_program(caller: FrameType) -> bool:
    module: str = caller.f_globals.get("__name__", "")
    if module == _CHECKING:
        return caller.f_code.co_qualname.startswith("Config.")
    return module.partition(".")[0] in _PROGRAM and module not in _SHOWING


def _walk(section: type[Strict], prefix: str) -> Iterator[tuple[str, type[Strict]]]:
    hints = get_type_hints(section)
    for field in msgspec.structs.fields(section):
        hint, key = hints[field.name], prefix + field.name
        held = get_args(hint)[-1] if get_origin(hint) in (list, dict) else None
        nested = _sections_in(hint) if held is None else []
        if not nested or type(None) in get_args(hint):
            yield key, section
        if held is not None:
            nested = _sections_in(held)
            key += "[]" if get_origin(hint) is list else ".NAME"
        for each in nested:
            yield from _walk(each, key + ".")


def _sections_in(hint: Any) -> list[type[Strict]]:
    return [each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, Strict)]
