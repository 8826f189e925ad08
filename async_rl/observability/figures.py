"""Describes each figure of a run once: what it is, its unit, and what a bad value looks like.

```
 journal_bytes = gauge("Size of the journal ...", bad="...")            an attribute of a class of `metrics`
 entropy: Annotated[Figure, Description("Mean entropy ...", bad="...")]          a field of `StepRecord`
      │
      ├─► the Prometheus instrument and its help text (`metrics.Instruments`)
      ├─► the value of the instrument after each step (`Metrics.observe_step`)
      ├─► the name in trackers (`trackers.names`)
      ├─► the descriptions of Grafana's panels (`monitoring.dashboard`)
      └─► `docs/reference/metrics.md` (`cli.metrics_reference`)
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, cast, get_type_hints

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
"""Buckets from the wake-up of a loop to a large trainer step."""

_UNITS: Final = {
    **{unit: unit for unit in ("bytes", "seconds", "tokens", "nats", "versions", "rows", "share")},
    **{"version": "versions", "step": "steps", "fraction": "share"},
}
"""Units by the last word of a metric's name."""


class Description(msgspec.Struct, frozen=True):
    """What one figure is, and how it appears outside of the code that measures it."""

    help: str = ""
    """One sentence: what a value is."""
    bad: str = ""
    """What a bad value looks like and what to do about it."""
    metric: str = ""
    """Name of its Prometheus instrument without the prefix, if that is not the attribute's or field's."""
    unit: str = ""
    """Unit of a value, if the name does not end in it; empty for a bare number."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""
    start: float = math.nan
    """What a gauge without labels reads until it is first set: NaN, as 0 would look like a measurement."""
    child: dict[str, str] = {}
    """For a field of a record: its labels, by name. The first field of an instrument describes it."""
    attribute: str = ""
    """For a field of a record: the attribute to observe, if not the field itself."""
    keep_last: bool = False
    """Whether the gauge keeps its last value in steps without one, as for a probe."""
    tracker: str = ""
    """verl's name of the same figure; empty for `async_rl/<field>`."""

    @property
    def kind(self) -> Literal["gauge", "counter", "histogram"]:
        """The kind of its instrument: counters end in `_total`, and histograms have buckets."""
        if self.metric.endswith("_total"):
            return "counter"
        return "histogram" if self.buckets else "gauge"

    def named(self, metric: str) -> Description:
        """Return the description of an instrument with this name, which may end in its unit."""
        word = metric.removesuffix("_total").rpartition("_")[2]
        return replace(
            self,
            metric=metric,
            unit=self.unit or _UNITS.get(word, ""),
            labels=self.labels or tuple(self.child),
        )

    def make(self, name: str, registry: CollectorRegistry) -> Gauge | Counter | Histogram:
        """Create the instrument and register it under its full name."""
        if self.kind == "counter":
            return Counter(name, self.help, self.labels, registry=registry)
        if self.kind == "histogram":
            return Histogram(name, self.help, self.labels, buckets=self.buckets, registry=registry)
        made = Gauge(name, self.help, self.labels, registry=registry)
        if not self.labels:
            made.set(self.start)
        return made


def gauge(text: str, *labels: str, bad: str, unit: str = "", start: float = math.nan) -> Gauge:
    """Declare a value that goes up and down; `start` is what it reads until it is first set."""
    return cast(Gauge, Description(text, bad, unit=unit, labels=labels, start=start))


def counter(text: str, *labels: str, bad: str, unit: str = "") -> Counter:
    """Declare a counter; its name ends in `_total`."""
    return cast(Counter, Description(text, bad, unit=unit, labels=labels))


def histogram(
    text: str, *labels: str, bad: str, unit: str = "", buckets: Sequence[float] = SECONDS
) -> Histogram:
    """Declare a distribution."""
    return cast(Histogram, Description(text, bad, unit=unit, labels=labels, buckets=tuple(buckets)))


def described_fields(record: type[msgspec.Struct]) -> dict[str, Description]:
    """Return the descriptions of a record's fields, in the order of the fields.

    A field without `bad` and `child` has no instrument.
    """
    hints = get_type_hints(record, include_extras=True)
    return {
        name: item.named(item.metric or name) if item.bad or item.child else item
        for name in record.__struct_fields__
        for item in getattr(hints[name], "__metadata__", ())
        if isinstance(item, Description)
    }
