"""Reads YAML and overrides into a `Config`; a mistake becomes one sentence that names the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.config.description import describe_fields
from async_rl.config.root import Config
from async_rl.errors import ConfigError
from async_rl.runtime import yaml12

RENAMED: Final = {"rollout.overage": "rollout.staleness_policy"}
"""Settings of earlier versions, and their present names."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, and check everything.

    Args:
        path: The YAML file.
        overrides: Each `a.b.c=value`; the value is parsed as YAML, so `null`, `true`, `[1, 2]` and numbers
        work.

    Raises:
        ConfigError: With the place, the actual value, what was expected, and what to do.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except OSError as e:
        raise ConfigError(f"cannot read the config {file}: {e.strerror}. Name an existing YAML file") from e
    try:
        tree = yaml12.load(text) or {}
    except yaml12.YAMLError as e:
        raise ConfigError(f"{file} is not valid YAML: {e}") from e
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, expected a mapping of sections")
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree, source=str(file))


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in a tree of plain values, in place."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds {child!r}, not a section")
        node = child
    try:
        node[leaf] = yaml12.load(value)
    except yaml12.YAMLError as e:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {e}") from e


def parse_config(tree: dict[str, Any], source: str = "config") -> Config:
    """Convert plain values to a `Config`, strictly.

    Raises:
        ConfigError: With the place, the actual value, what was expected, and what to do.
    """
    _refuse_renamed(tree, source)
    engine = tree.setdefault("engine", {})
    if isinstance(engine, dict):
        engine.setdefault("kind", "sglang")
    match tree:
        case {"rollout": {"rewards": dict(rewards)}}:
            for reward in rewards.values():
                if isinstance(reward, dict):
                    reward.setdefault("kind", "function")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{source}: {_readable(str(e), tree)}") from e


def to_builtins(config: Config) -> dict[str, Any]:
    """Return the config as plain values, with every default filled in."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def _refuse_renamed(tree: dict[str, Any], source: str) -> None:
    for old, new in RENAMED.items():
        *parents, leaf = old.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and leaf in node:
            raise ConfigError(f"{source}: {old} was renamed: use {new}")


def _readable(message: str, tree: dict[str, Any]) -> str:
    """Add the actual value and the nearest known key to msgspec's message."""
    unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.?([\w.\[\]]*)`)?", message)
    if unknown:
        name, section = unknown.group(1), re.sub(r"\[\d+\]", "[...]", unknown.group(2) or "")
        prefix = f"{section}." if section else ""
        keys = (key.replace(".NAME.", "[...].").replace("[].", "[...].") for key, *_ in describe_fields())
        known = sorted({key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown field {name!r} - at $.{unknown.group(2) or ''}; {hint}".replace("$.;", "$;")
    place = re.search(r"`\$\.([\w.]+)`", message)
    if place:
        value: Any = tree
        for part in place.group(1).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            found = f"{message.replace('`', chr(39))}; found {value!r}"
            kinds = {key: kind for key, kind, *_ in describe_fields()}
            choices = kinds.get(place.group(1)) if "enum" in message else None
            return f"{found}, expected one of {choices.replace(' | ', ', ')}" if choices else found
    return message.replace("`", "'")
