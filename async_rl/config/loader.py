"""Reads YAML and overrides into a `Config`; a mistake becomes one sentence that names the remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.config.description import describe_fields
from async_rl.config.hub_models import with_folders
from async_rl.config.root import Config
from async_rl.errors import ConfigError
from async_rl.runtime import yaml12
from async_rl.runtime.loading import add_import_folder

DEFAULT_ENGINE: Final = "sglang"
"""The `kind` of engines that name none."""

DEFAULT_REWARD: Final = "function"
"""The `kind` of a reward in `rollout.rewards` that names none."""

_PATHS: Final = (
    *(("run", "dir"), ("metrics", "targets_dir"), ("weights", "local_dir")),
    *(("model", "path"), ("data", "path")),
)
"""Settings in which `~` is the user's home; a shell leaves it in `run.dir=~/runs`."""

_YES_AND_NO: Final = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
"""What YAML 1.1 reads as a boolean and YAML 1.2 as text."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, download_weights: bool = True) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, and check everything.

    Models on the Hugging Face Hub are downloaded. From then on `runtime.loading` also finds modules beside
    the file.

    Args:
        path: The YAML file.
        overrides: Each `a.b.c=value`; the value is parsed as YAML, so `null`, `true`, `[1, 2]` and numbers
        work.
        download_weights: Whether the weights of models on the Hub are downloaded; without, only their configs
            and tokenizers.

    Raises:
        ConfigError: With the place, the actual value, what was expected, and what to do.
        EnvironmentNotReady: The Hub cannot be reached.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    except OSError as e:
        raise ConfigError(f"cannot read the config {file}: {e.strerror}. Name an existing YAML file") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file} is not UTF-8 ({e.reason} at byte {e.start}): save it as UTF-8") from e
    try:
        tree = yaml12.load(text) or {}
    except yaml12.YAMLError as e:
        raise ConfigError(f"{file} is not valid YAML: {yaml12.describe_error(e)}") from e
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}, expected a mapping of sections")
    for override in overrides:
        apply_override(tree, override)
    add_import_folder(file.parent)
    config = parse_config(tree, source=str(file), overrides=overrides)
    return with_folders(config, weights=download_weights)


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
        why = yaml12.describe_error(e)
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {why}") from e


def parse_config(tree: dict[str, Any], source: str = "config", *, overrides: Sequence[str] = ()) -> Config:
    """Convert plain values to a `Config`, strictly.

    Args:
        tree: The values, with the overrides applied.
        source: Where they come from, for messages.
        overrides: What was applied. A message about one of them names it in place of the source.

    Raises:
        ConfigError: With the place, the actual value, what was expected, and what to do.
    """
    for section, name in _PATHS:
        if isinstance(place := tree.get(section), dict) and isinstance(path := place.get(name), str):
            place[name] = os.path.expanduser(path)
    engine = tree.setdefault("engine", {})
    if isinstance(engine, dict):
        engine.setdefault("kind", DEFAULT_ENGINE)
    match tree:
        case {"rollout": {"rewards": dict(rewards)}}:
            for reward in rewards.values():
                if isinstance(reward, dict):
                    reward.setdefault("kind", DEFAULT_REWARD)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        message = str(e)
        place = _place(message)
        if place:
            raise ConfigError(f"{_blame(place, source, overrides)}: {_readable(message, tree)}") from e
        # A check of several settings, whose message names them.
        applied = [override for override in overrides if override.partition("=")[0] in message]
        where = " with ".join([source, *([" ".join(applied)] if applied else [])])
        raise ConfigError(f"{where}: {_readable(message, tree)}") from e


def to_builtins(config: Config) -> dict[str, Any]:
    """Return the config as plain values, with every default filled in."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def _place(message: str) -> str:
    """Return the dotted key that a message of msgspec is about, as far as it is one; else nothing.

    Example:
        >>> _place("Object contains unknown field `nam` - at `$.data.datasets[0]`")
        'data.datasets'
        >>> _place("Object contains unknown field `modle`")
        'modle'
    """
    found = re.search(r"`\$\.([\w.]+)(\[)?", message)
    place = found.group(1) if found else ""
    unknown = re.search(r"unknown field `(\w+)`", message)
    if unknown and not (found and found.group(2)):
        return f"{place}.{unknown.group(1)}".lstrip(".")
    return place


def _blame(place: str, source: str, overrides: Sequence[str]) -> str:
    """Return the override that set a key, or something in or around it; else the source."""
    for override in reversed(overrides):
        key = override.partition("=")[0]
        if f"{place}.".startswith(f"{key}.") or key.startswith(f"{place}."):
            return f"override {override!r}"
    return source


def _kinds_of_fields(prefix: str) -> dict[str, list[str]]:
    """Return the fields of a section, sorted, with the kinds of the section that have each."""
    found: dict[str, list[str]] = {}
    kind = ""
    for key, _, default, _ in describe_fields():
        place = key.replace(".NAME.", "[...].").replace("[].", "[...].")
        if place == f"{prefix}kind":
            kind = str(default)
        if place.startswith(prefix):
            kinds = found.setdefault(re.split(r"[.[]", place[len(prefix) :])[0], [])
            kinds += [kind] if kind not in kinds else []
    return dict(sorted(found.items()))


def _readable(message: str, tree: dict[str, Any]) -> str:
    """Add the actual value and the nearest known key to msgspec's message."""
    unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.?([\w.\[\]]*)`)?", message)
    if unknown:
        name, section = unknown.group(1), re.sub(r"\[\d+\]", "[...]", unknown.group(2) or "")
        prefix = f"{section}." if section else ""
        known = _kinds_of_fields(prefix)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        if owners := " or ".join(filter(None, known.get(name, ()))):
            hint = f"it belongs to kind {owners}: remove it, or change {section}.kind"
        return f"unknown field {name!r} - at $.{unknown.group(2) or ''}; {hint}".replace("$.;", "$;")
    found_tag = re.search(r"Invalid value '(.*)' - at `\$\.([\w.\[\]]+\.kind)`", message)
    if found_tag:
        key_of_tag = found_tag.group(2).replace("[...]", ".NAME")
        tags = [str(tag) for key, _, tag, _ in describe_fields() if key == key_of_tag]
        return f"{found_tag.group(2)} is {found_tag.group(1)!r}, expected one of {', '.join(tags)}"
    strange_key = re.search(r"Invalid enum value '(.*)' - at `key` in `\$\.([\w.\[\]]+)`", message)
    if strange_key:
        name, key = strange_key.groups()
        kinds = {known: kind for known, kind, *_ in describe_fields()}
        fields = kinds[re.sub(r"\[\d+\]", "[]", key)].removeprefix("dict[").partition(",")[0]
        return f"unknown key {name!r} - at $.{key}; known here: {fields.replace(' | ', ', ')}"
    place = re.search(r"`\$\.([\w.]+)`", message)
    if place:
        value: Any = tree
        for part in place.group(1).split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict):
            found = f"{message.replace('`', chr(39))}; found {value!r}"
            kinds = {key: kind for key, kind, *_ in describe_fields()}
            choices = kinds.get(place.group(1)) if "enum" in message else None
            if choices:
                return f"{found}, expected one of {choices.replace(' | ', ', ')}"
            meant = _YES_AND_NO.get(str(value).lower()) if "bool" in message else None
            return f"{found}; write {meant}" if meant else found
    return message.replace("`", "'")
