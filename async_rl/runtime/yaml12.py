"""Read and write YAML with the scalar rules of version 1.2.

PyYAML follows version 1.1, where `replay: off` is the boolean false and `lr: 1e-6` is a string.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

YAMLError = yaml.YAMLError

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_BOOL_PATTERN = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT_PATTERN = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
"""Source: YAML 1.2.2, section 10.3.2 (core schema). Integers are resolved before floats."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes strings that either version would read as another type."""


_Loader.add_implicit_resolver(_BOOL, _BOOL_PATTERN, list("tTfF"))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _FLOAT_PATTERN, list("-+.0123456789"))


def load(text: str) -> Any:
    """Parse one document of plain values.

    Raises:
        YAMLError: The text is not valid YAML.
    """
    return yaml.load(text, Loader=_Loader)


def dump(tree: Any) -> str:
    """Write plain values with keys in their order; `load` and any YAML 1.1 reader return the same values."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
