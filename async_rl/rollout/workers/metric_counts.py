"""What metrics of a rollout worker counted, added to those of the driver.

Only counters and histograms: they are sums, of whichever process. A gauge of a worker stays with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from async_rl.observability.metrics import Metrics, declared
from async_rl.rollout.workers.messages import Count

_Known = dict[tuple[str, tuple[str, ...]], tuple[float, ...]]


class Increments:
    """Tells what came since it was asked last.

    Example:
        >>> increments = Increments(metrics)
        >>> metrics.tool_calls_total.labels("search", "ok").inc()
        >>> add(increments.since_last(), driver_metrics)
    """

    def __init__(self, metrics: Metrics) -> None:
        """Everything so far counts as new."""
        self._metrics = metrics
        self._told: _Known = {}

    def since_last(self) -> tuple[Count, ...]:
        """What is new."""
        news = []
        for name, labels, values in _sums(self._metrics):
            before = self._told.get((name, labels), (0.0,) * len(values))
            if values != before:
                self._told[name, labels] = values
                value, *buckets = (now - then for now, then in zip(values, before, strict=True))
                news.append(Count(name=name, labels=labels, value=value, buckets=tuple(buckets)))
        return tuple(news)


def add(counts: Iterable[Count], metrics: Metrics) -> None:
    """Count it here as well."""
    names = {name for name, _ in _summed(metrics)}
    for count in counts:
        if count.name not in names:
            continue  # a worker of another version
        instrument = getattr(metrics, count.name)
        child = instrument.labels(*count.labels) if count.labels else instrument
        if not count.buckets:
            child.inc(count.value)
            continue
        # There is no public way to add observations without their values.
        child._sum.inc(count.value)
        for bucket, value in zip(child._buckets, count.buckets, strict=True):
            bucket.inc(value)


def _sums(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...], tuple[float, ...]]]:
    """Each counter's value; each histogram's sum and buckets, which are not cumulative there."""
    for name, instrument in _summed(metrics):
        children = instrument._metrics.items() if instrument._labelnames else [((), instrument)]
        for labels, child in list(children):
            if hasattr(child, "_buckets"):
                yield name, labels, (child._sum.get(), *(bucket.get() for bucket in child._buckets))
            else:
                yield name, labels, (child._value.get(),)


def _summed(metrics: Metrics) -> Iterator[tuple[str, Any]]:
    for section in declared(type(metrics)):
        for name, declaration in section.declarations.items():
            if declaration.kind != "gauge":
                yield name, getattr(metrics, name)
