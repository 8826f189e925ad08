"""The settings as data: for docs/reference/config.md, and for what a run has changed."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from async_rl.config.base import Strict
from async_rl.config.data_settings import DataConfig
from async_rl.config.root import Config
from async_rl.config.run_settings import ModelConfig


def describe_fields() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted key, type, default, description) of every setting, in order; NODEFAULT for none."""
    yield from _describe(Config, "")


def changed_fields(config: Config) -> dict[str, Any]:
    """Return the dotted keys whose value differs from the default, with the value."""
    required = Config(model=ModelConfig(path=""), data=DataConfig(path=""), engine=type(config.engine)())
    defaults = dict(_flatten(required)) | {"data.path": None, "engine.kind": "sglang"}
    # A section that is null by default has no defaults of its own while it is.
    return {key: value for key, value in _flatten(config) if value != defaults.get(key, msgspec.NODEFAULT)}


def _flatten(section: Strict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if tag := section.__struct_config__.tag:
        yield prefix + "kind", tag
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Strict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, msgspec.to_builtins(value)


def _describe(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        sections = [t for t in (hint, *get_args(hint)) if isinstance(t, type) and issubclass(t, Strict)]
        if sections:
            if type(None) in get_args(hint):
                yield key, "section | null", field.default, (sections[0].__doc__ or "").split("\n")[0]
            for section in sections:
                tag = section.__struct_config__.tag
                if len(sections) > 1:
                    yield f"{key}.kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
                yield from _describe(section, key + ".")
            continue
        description = ""
        if get_origin(hint) is Annotated:
            base, *metas = get_args(hint)
            description = next((m.description for m in metas if m.description), "")
            hint = base
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield key, _type_name(hint), default, description
        for section in _entries(hint):
            entry = key + ("[]." if get_origin(hint) is list else ".NAME.")
            if (tag := section.__struct_config__.tag) is not None:
                yield f"{entry}kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
            yield from _describe(section, entry)


def _entries(hint: Any) -> list[type[Strict]]:
    """Return the config classes of the entries of a list or a mapping."""
    if get_origin(hint) not in (list, dict):
        return []
    held = get_args(hint)[-1]
    return [t for t in (held, *get_args(held)) if isinstance(t, type) and issubclass(t, Strict)]


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(str(value) for value in get_args(hint))
    if get_origin(hint) is Annotated:
        return _type_name(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("null" if t is type(None) else _type_name(t) for t in get_args(hint))
    if _entries(hint):
        return "list" if get_origin(hint) is list else "mapping"
    if get_origin(hint) is tuple:
        return f"list[{_type_name(get_args(hint)[0])}]"
    if get_origin(hint) in (dict, list):
        return f"{get_origin(hint).__name__}[{', '.join(_type_name(t) for t in get_args(hint))}]"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
