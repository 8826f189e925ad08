"""Adds what the metrics of a rollout worker counted to those of the driver.

Only counters and histograms are added, because they are sums over processes. Gauges stay in their worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from prometheus_client import Histogram

from async_rl.observability.metrics import Metrics, declared
from async_rl.rollout.workers.messages import MetricIncrement

_KnownValues = dict[tuple[str, tuple[str, ...]], tuple[float, ...]]


class IncrementCollector:
    """Collects what metrics have counted since the last collection."""

    def __init__(self, metrics: Metrics) -> None:
        """Start at zero: everything counted so far is part of the first collection."""
        self._metrics = metrics
        self._collected: _KnownValues = {}

    def collect_increments(self) -> tuple[MetricIncrement, ...]:
        """Return the increments since the last call."""
        increments = []
        for name, labels, values in _sums(self._metrics):
            before = self._collected.get((name, labels), (0.0,) * len(values))
            if values != before:
                self._collected[name, labels] = values
                value, *buckets = (now - then for now, then in zip(values, before, strict=True))
                increments.append(
                    MetricIncrement(name=name, labels=labels, value=value, buckets=tuple(buckets))
                )
        return tuple(increments)


def add_increments(increments: Iterable[MetricIncrement], metrics: Metrics) -> None:
    """Add increments to the metrics of this process.

    Raises:
        ValueError: One does not fit its metric.
    """
    names = _names_summed()
    for increment in increments:
        if increment.name not in names:
            continue  # from a worker of another version
        instrument = getattr(metrics, increment.name)
        if bool(increment.buckets) is not isinstance(instrument, Histogram):
            raise ValueError(f"{increment.name} is of another type")
        child = instrument.labels(*increment.labels) if increment.labels else instrument
        if not increment.buckets:
            child.inc(increment.value)
            continue
        # prometheus_client has no public way to add observations without their values.
        child._sum.inc(increment.value)
        for bucket, value in zip(child._buckets, increment.buckets, strict=True):
            bucket.inc(value)


def _sums(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...], tuple[float, ...]]]:
    """Yield each counter's value, and each histogram's sum and (non-cumulative) buckets."""
    for name in _names_summed():
        instrument: Any = getattr(metrics, name)
        children = instrument._metrics.items() if instrument._labelnames else [((), instrument)]
        for labels, child in list(children):
            if hasattr(child, "_buckets"):
                yield name, labels, (child._sum.get(), *(bucket.get() for bucket in child._buckets))
            else:
                yield name, labels, (child._value.get(),)


@cache
def _names_summed() -> dict[str, None]:
    """Return the names of counters and histograms, in order; heartbeats ask for them all the time."""
    return {name: None for name, described in declared(Metrics).items() if described.kind != "gauge"}
