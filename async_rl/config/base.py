"""Base class and types of the config sections."""

from __future__ import annotations

from typing import Annotated

import msgspec

Meta = msgspec.Meta
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config. The docstring of a field describes the setting."""
