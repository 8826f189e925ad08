"""The settings as data: for docs/reference/config.md, and for what a run has changed."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
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


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings of a section's fields by name, each as one line."""
    found: dict[str, str] = {}
    for part in reversed(struct.__mro__):
        if issubclass(part, Strict):
            found |= _descriptions_in(part.__module__).get(part.__name__, {})
    return found


@cache
def _descriptions_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(section, ast.ClassDef):
            texts = found[section.name] = {}
            for field, after in pairwise(section.body):
                match field, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        texts[name] = " ".join(text.split())
    return found


def _describe(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints, descriptions = get_type_hints(struct, include_extras=True), field_descriptions(struct)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        if sections := _sections(hint):
            if type(None) in get_args(hint):
                yield key, "section | null", field.default, (sections[0].__doc__ or "").split("\n")[0]
            for section in sections:
                tag = section.__struct_config__.tag
                if len(sections) > 1:
                    yield f"{key}.kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
                yield from _describe(section, key + ".")
            continue
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.to_builtins(field.default_factory())
        yield key, _type_name(hint), default, descriptions.get(field.name, "")
        for section in _entry_sections(hint):
            entry = key + ("[]." if get_origin(hint) is list else ".NAME.")
            if (tag := section.__struct_config__.tag) is not None:
                yield f"{entry}kind", "literal", tag, (section.__doc__ or "").split("\n")[0]
            yield from _describe(section, entry)


def _sections(hint: Any) -> list[type[Strict]]:
    """Return the config classes of a field; those of the entries of a list or a mapping do not count."""
    parts = () if get_origin(hint) in (list, dict) else (hint, *get_args(hint))
    return [part for part in parts if isinstance(part, type) and issubclass(part, Strict)]


def _entry_sections(hint: Any) -> list[type[Strict]]:
    """Return the config classes of the entries of a list or a mapping."""
    return _sections(get_args(hint)[-1]) if get_origin(hint) in (list, dict) else []


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(str(value) for value in get_args(hint))
    if get_origin(hint) is Annotated:
        return _type_name(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("null" if t is type(None) else _type_name(t) for t in get_args(hint))
    if _entry_sections(hint):
        return "list" if get_origin(hint) is list else "mapping"
    if get_origin(hint) is tuple:
        return f"list[{_type_name(get_args(hint)[0])}]"
    if get_origin(hint) in (dict, list):
        return f"{get_origin(hint).__name__}[{', '.join(_type_name(t) for t in get_args(hint))}]"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
