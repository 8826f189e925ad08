"""The config as text: the reference page, the JSON schema, the resolved YAML of a run, package versions."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import get_args, get_type_hints

import msgspec

from async_rl import config
from async_rl.config import Config, describe_fields, to_builtins
from async_rl.config.description import field_descriptions
from async_rl.config.loader import DEFAULT_ENGINE, DEFAULT_REWARD
from async_rl.runtime import yaml12

_PACKAGES = ("async-rl", "sglang", "torch", "megatron-core", "transformers", "ray", "numpy")

_HEAD = """# Settings

Every setting of a run, with its type, its default and its meaning. `make docs` generates this page from
`async_rl/config/`.

A config is a YAML file of these sections; `model.path` is required, and so is `data.path` or `data.datasets`.
Keys of the entries of a list are written `data.datasets[].path`, those of named entries
`rollout.rewards.NAME.url`; an entry also accepts the keys of its section, such as those of `data`. On the
command line `dotted.key=value` changes a setting for one run, for example `async-rl train run.yaml
rollout.max_staleness=2`. Unknown keys and values out of range are refused with the nearest known key or the
bound. `async-rl check run.yaml --resolved` prints the resolved config.
"""


def json_schema() -> str:
    """Return the JSON schema (2020-12) of a config file, for editors."""
    schema = msgspec.json.schema(Config)
    for name, section in schema["$defs"].items():
        for field, text in field_descriptions(getattr(config, name)).items():
            section["properties"][field]["description"] = text
        kind = section.get("properties", {}).get("kind", {})
        if kind.get("enum", [None])[0] in (DEFAULT_ENGINE, DEFAULT_REWARD):  # the loader fills it in
            section["required"].remove("kind")
            kind["default"] = kind["enum"][0]
    return json.dumps(schema, indent=2) + "\n"


def markdown() -> str:
    """Return the page `docs/reference/config.md`: one table per section, in the order of the config."""
    lines, section = [_HEAD], ""
    seen: set[tuple[str, ...]] = set()
    abouts = _abouts()
    for key, kind, default, text in describe_fields():
        name = key.split(".")[0]
        kind_of_section = key == f"{name}.kind"
        if name != section or kind_of_section:
            section, seen = name, set()
            title = f"{name}, {default}" if kind_of_section else name
            lines += [
                f"\n## {title}\n",
                f"\n{abouts[title]}\n",
                "\n| setting | type | default | |\n|---|---|---|---|\n",
            ]
        shown = "required" if default is msgspec.NODEFAULT else f"`{json.dumps(default)}`"
        escaped = kind.replace("|", "\\|")
        row = f" | {escaped} | {shown} | {text} |\n"
        if (key.rpartition(".")[2], row) not in seen:  # entries of a list repeat settings of their section
            lines.append(f"| `{key}`{row}")
        seen.add((key.rpartition(".")[2], row))
    return "".join(lines)


def resolved_yaml(resolved: Config) -> str:
    """Return a config with every default filled in, as YAML that loads to the same config."""
    return yaml12.dump(to_builtins(resolved))


def versions() -> dict[str, str]:
    """Return the installed versions of Python, this package and the packages it depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _abouts() -> dict[str, str]:
    """Return the first paragraph of each section's docstring, by the section's title."""
    hints = get_type_hints(Config)
    titles: dict[str, type] = {name: hint for name, hint in hints.items() if isinstance(hint, type)}
    titles["models"] = get_args(hints["models"])[1]
    titles |= {f"engine, {kind.__struct_config__.tag}": kind for kind in get_args(hints["engine"])}
    return {title: " ".join((kind.__doc__ or "").split("\n\n")[0].split()) for title, kind in titles.items()}
