"""Declaring Prometheus instruments as data: what each is, who observes it, and what a bad value means.

```
class Metrics(Instruments):
    reward = gauge("Mean reward of the last batch.", unit="", source="...", bad="...")
        │
        ├─► an instance: an instrument of the client library, in the instance's own registry
        └─► declared(Metrics): the declaration, for docs/reference/metrics.md
```

To type checkers an attribute is the instrument, which it is on every instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "async_rl_"


@dataclass(frozen=True)
class Declaration:
    """One instrument, before there is one."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    """One sentence: what a value is."""
    unit: str
    """Of a value; empty where it is a bare number."""
    source: str
    """The module that observes it, and when."""
    bad: str
    """What a bad value looks like and what to do about it; empty where none is bad by itself."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""

    def make(self, name: str, registry: CollectorRegistry) -> Gauge | Counter | Histogram:
        """The instrument, registered under a full name."""
        if self.kind == "gauge":
            return Gauge(name, self.help, self.labels, registry=registry)
        if self.kind == "counter":
            return Counter(name, self.help, self.labels, registry=registry)
        return Histogram(name, self.help, self.labels, buckets=self.buckets, registry=registry)


def gauge(text: str, *labels: str, unit: str = "", source: str, bad: str) -> Gauge:
    """Declare a value that goes up and down."""
    return cast(Gauge, Declaration("gauge", text, unit, source, bad, labels))


def counter(text: str, *labels: str, unit: str = "", source: str, bad: str) -> Counter:
    """Declare a count that only rises; its name ends in `_total`."""
    return cast(Counter, Declaration("counter", text, unit, source, bad, labels))


def histogram(
    text: str, *labels: str, buckets: Sequence[float], unit: str = "", source: str, bad: str
) -> Histogram:
    """Declare a distribution."""
    return cast(Histogram, Declaration("histogram", text, unit, source, bad, labels, tuple(buckets)))


def value_of(metric: Counter | Gauge) -> float:
    """What a metric without labels stands at; in public the client library tells it by a scrape alone."""
    return float(metric._value.get())


class Instruments:
    """Instruments of one run, made of the declarations of the class, in a registry of their own.

    Two runs in one process (the tests) do not meet.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for section in declared(type(self)):
            for name, declaration in section.declarations.items():
                setattr(self, name, declaration.make(PREFIX + name, self.registry))


class MetricSection(NamedTuple):
    """Instruments that one class declares."""

    title: str
    """First line of the class's docstring, without its full stop."""
    declarations: dict[str, Declaration]


def declared(instruments: type[Instruments]) -> Iterator[MetricSection]:
    """The declarations of a class and its bases, in the order in which it names them."""
    for part in instruments.__mro__:
        found = {name: value for name, value in vars(part).items() if isinstance(value, Declaration)}
        if found:
            yield MetricSection((part.__doc__ or part.__name__).splitlines()[0].rstrip("."), found)
