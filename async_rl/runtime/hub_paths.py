"""Paths in the config that may name something on the Hugging Face Hub: `hub:NAME?option=value&…`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from async_rl.errors import ConfigError

PREFIX: Final = "hub:"

_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


class HubPath(NamedTuple):
    """The parts of `hub:openai/gsm8k?config=main&split=test`, or of a folder with such options."""

    name: str
    """The repository's name on the Hub, or the folder."""
    options: dict[str, str]
    on_hub: bool


def parse_hub_path(path: str, place: str, known: Sequence[str]) -> HubPath:
    """Parse a path; one that exists has no options, whatever is in it.

    Args:
        path: The path.
        place: The setting that holds it, for messages.
        known: The options that it may have.

    Raises:
        ConfigError: It is malformed, or has another option.
    """
    if not (on_hub := path.startswith(PREFIX)) and Path(path).exists():
        return HubPath(path, {}, on_hub=False)
    name, _, query = path.removeprefix(PREFIX).partition("?")
    if on_hub and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{place} is {path!r}; expected {PREFIX}OWNER/NAME after a name on the Hugging Face Hub"
        )
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        option, _, value = part.partition("=")
        if option not in known or not value:
            expected = ", ".join(f"{each}=…" for each in known)
            raise ConfigError(f"{place} is {path!r}: {part!r} is no option of it; expected {expected}")
        options[option] = value
    return HubPath(name, options, on_hub)


def suggest_hub(path: str) -> str:
    """Return what to write if a path that does not exist was meant as a name on the Hub; else nothing."""
    return (
        f"; for the Hugging Face Hub write {PREFIX}{path}"
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
        else ""
    )
