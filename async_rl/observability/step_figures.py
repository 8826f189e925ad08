"""Declare a figure of a trainer step once, on its field of `StepRecord`.

```
 effective_sample_share: Annotated[Figure, figure("Effective sample size ...", gauge=..., tracker=...)]
      │
      ├─► the Prometheus instrument, its help text and its reference row (`metrics.with_step_figures`)
      ├─► its value after each step (`Metrics.observe_step`)
      ├─► its name in trackers (`trackers.names`)
      └─► which figures the trainer must measure (`records.FIGURES`, `records.COUNTS`)
```
"""

from __future__ import annotations

from typing import Literal, get_type_hints

import msgspec

Section = Literal["policy", "agreement", "flow", "routing", "trainer"]
"""The section of the metrics reference that lists an instrument."""


class StepFigure(msgspec.Struct, frozen=True, kw_only=True):
    """How one field of `StepRecord` appears outside the record."""

    help: str = ""
    """One sentence: what the value is."""
    kind: Literal["gauge", "counter", "histogram", ""] = ""
    metric: str = ""
    """Name of the instrument without its prefix; empty if the field has none."""
    labels: dict[str, str] = {}
    section: Section | None = None
    """Set on the first field of an instrument, which declares it; further fields only add label values."""
    unit: str = ""
    bad: str = ""
    """What a bad value looks like, and what to do about it."""
    source: str = ""
    """Where the figure comes from, if neither the trainer nor the batch."""
    attribute: str = ""
    """Attribute of the record to observe, if not the field itself."""
    keep_last: bool = False
    """Whether the gauge keeps its last value in steps without one, as for a probe."""
    tracker: str = ""
    """verl's name of the same figure; empty for `async_rl/<field>`."""
    from_trainer: bool = False
    """Whether the trainer measures it."""


def figure(
    help: str = "",
    *,
    gauge: str = "",
    counter: str = "",
    histogram: str = "",
    labels: dict[str, str] | None = None,
    section: Section | None = None,
    unit: str = "",
    bad: str = "",
    source: str = "",
    attribute: str = "",
    keep_last: bool = False,
    tracker: str = "",
    from_trainer: bool = False,
) -> StepFigure:
    """Declare a field of `StepRecord`; name at most one of `gauge`, `counter` and `histogram`."""
    kind: Literal["gauge", "counter", "histogram", ""] = (
        "gauge" if gauge else "counter" if counter else "histogram" if histogram else ""
    )
    return StepFigure(
        help=help,
        kind=kind,
        metric=gauge or counter or histogram,
        labels=labels or {},
        section=section,
        unit=unit,
        bad=bad,
        source=source,
        attribute=attribute,
        keep_last=keep_last,
        tracker=tracker,
        from_trainer=from_trainer,
    )


def declared_figures(record: type[msgspec.Struct]) -> dict[str, StepFigure]:
    """Return the declarations of a record's fields, in the order of the fields."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: item
        for name in record.__struct_fields__
        for item in getattr(hints[name], "__metadata__", ())
        if isinstance(item, StepFigure)
    }
