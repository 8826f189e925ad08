"""Base class and types of the config sections."""

from __future__ import annotations

from typing import Annotated

import msgspec

Meta = msgspec.Meta
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the config."""
