"""Read and write YAML with the scalar rules of version 1.2.

PyYAML follows version 1.1, where `replay: off` is the boolean false, `lr: 1e-6` is a string, `010` is 8,
`1:00` is 60, `1_000` is 1000 and `2026-11-28` is a date. It also takes the last of two equal keys, which
version 1.2 forbids.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

YAMLError = yaml.YAMLError

_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_VALUES = {_BOOL, _INT, _FLOAT, "tag:yaml.org,2002:null"}
"""Tags of scalars that can be written in several ways."""
_OF_VERSION_1_1 = {_BOOL, _INT, _FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
_BOOL_PATTERN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT_PATTERN = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT_PATTERN = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
"""Source: YAML 1.2.2, section 10.3.2 (core schema). Integers are resolved before floats."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OF_VERSION_1_1]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, because the keys that `<<` merges may be there, too.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            # Values, because Python has one key where some notations differ, such as 1, 01, 1.0 and true.
            name = self.construct_object(key) if key.tag in _VALUES else (key.tag, key.value)
            if name in seen:
                problem = f"the key {key.value!r} is in line {seen[name]} already"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen[name] = key.start_mark.line + 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # Own keys come after those that `<<` merges. Where this mapping is merged in turn, PyYAML 6.0.4 takes
        # the first of two, so that only the last may be left.
        last = {
            (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key): (key, value)
            for key, value in node.value
        }
        node.value = list(last.values())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # PyYAML's, and of an int of over 4,300 digits
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"{node.value!r:.60} is not valid for its tag {tag}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """Quotes strings that either version would read as another type."""


_Loader.add_constructor(_INT, _construct_int)
_Loader.add_implicit_resolver(_BOOL, _BOOL_PATTERN, list("tTfF"))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_INT, _INT_PATTERN, list("-+0123456789"))
    _kind.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("-+.0123456789"))


def load(text: str) -> Any:
    """Parse one document of plain values.

    Raises:
        YAMLError: The text is not valid YAML, or nested more deeply than this can read.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise YAMLError("its values are nested too deeply") from None


def describe_error(error: YAMLError) -> str:
    """Return what is wrong, and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = ", ".join(filter(None, [error.context, error.problem]))
        return f"{what} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def dump(tree: Any) -> str:
    """Write plain values with keys in their order; `load` and any YAML 1.1 reader return the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
