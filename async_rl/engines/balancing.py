"""Which engine a call goes to: sticky, least loaded, paced. Pure: no clock, no I/O.

```
 a trajectory with a cached prefix ─► its sticky engine, unless overloaded ──┐
 any other ─────────────────────────► the least loaded engine with capacity ─┴─► none? then wait
```

Load is counted in tokens: the most that the calls of an engine can hold there. Four rules, the first three
against overload cascades seen in systems without them (verl#6533, #7435, #7613):

- **Bounded loads.** No engine is given a call while its load is above `1 + SLACK` times the mean of the
  serving engines. A sticky engine is kept below that bound even when another is less loaded: an engine that
  restarts empty attracts new trajectories, but not those whose prefix is cached elsewhere.
- **Paced prefills.** An engine is full while `MAX_PREFILL_TOKENS` or more wait there for the first token of
  their calls. After a restart, a failure or an update all calls have to prefill everything: calls for which
  an engine has no capacity go to the next one, or wait here, where they can still be ordered.
- **A cached prefix keeps its sticky engine** even when that is full: elsewhere the call would need a prefill.
- **Limited calls.** An engine that has refused calls gets a limit of calls (`back_pressure`), which also
  holds for a cached prefix. It takes less than its share, so the mean and the bound leave it out.

So after each choice `load <= (1 + SLACK) * mean before + tokens of the call`. A call that finds no engine
within the bound waits for the engines below the mean, whose prefills end or fail: the wait ends.

Source of bounded loads: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads",
arXiv:1608.01350, section 1.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

MAX_PREFILL_TOKENS: int | None = 32768
"""Tokens waiting for a first token that make an engine full: it prefills them in about a second. Calls that
wait go to the first engine that is ready. None: all are sent at once."""

SLACK: Final = 0.25
"""How far above the mean load a sticky engine is kept: a quarter costs little batch efficiency and, at 64
calls an engine, is about two standard deviations of random arrivals."""


class _EngineEntry:
    """The load of one engine."""

    __slots__ = (
        "load_tokens",
        "max_calls",
        "name",
        "num_calls",
        "num_sharers",
        "order",
        "prefill_tokens",
        "serves",
    )

    def __init__(self, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self.serves = False
        self.load_tokens = 0
        self.prefill_tokens = 0
        self.num_calls = 0
        self.num_sharers = 1
        self.max_calls = math.inf

    @property
    def counts(self) -> bool:
        """Whether its load counts in the mean."""
        return self.serves and self.max_calls == math.inf


class Balancer:
    """Loads of engines, and the choice between them in O(log engines).

    Example:
        >>> balancer = Balancer()
        >>> for name in ("a", "b"):
        ...     balancer.add_engine(name)
        ...     balancer.open_engine(name)
        >>> balancer.begin_call("a", tokens=100, prefill_tokens=100)
        >>> balancer.choose_engine(), balancer.choose_engine(sticky="a")
        ('b', 'b')
    """

    def __init__(self, *, max_prefill_tokens: int | None = None) -> None:
        """Start without engines.

        Args:
            max_prefill_tokens: Tokens waiting for a first token that make an engine full; None for no limit.
        """
        self._max_prefill_tokens = max_prefill_tokens
        self._entries: dict[str, _EngineEntry] = {}
        self._num_added = 0
        self._num_counted = 0
        self._counted_tokens = 0
        # Serving engines with capacity, by load; outdated entries are skipped.
        self._heap: list[tuple[int, int, _EngineEntry]] = []

    # -- engines ------------------------------------------------------------------------------------------

    def add_engine(self, name: str) -> None:
        """Add an engine; it is not chosen before `open_engine`."""
        self._entries[name] = _EngineEntry(name, self._num_added)
        self._num_added += 1

    def remove_engine(self, name: str) -> None:
        """Forget an engine and its load."""
        self.close_engine(name)
        del self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def open_engine(self, name: str) -> None:
        """Let an engine be chosen, because it serves."""
        self._set(self._entries[name], serves=True)

    def close_engine(self, name: str) -> None:
        """Do not choose an engine any more; its calls count until they end."""
        self._set(self._entries[name], serves=False)

    def limit_calls(self, name: str, max_calls: float) -> None:
        """Give an engine no calls while it has `max_calls` of them."""
        if self._entries[name].max_calls != max_calls:
            self._set(self._entries[name], max_calls=max_calls)

    def share_prefills(self, name: str, num_sharers: int) -> None:
        """Let so many processes share the tokens that wait on an engine for their first token."""
        entry = self._entries[name]
        entry.num_sharers = num_sharers
        self._offer(entry)

    # -- calls --------------------------------------------------------------------------------------------

    def choose_engine(self, *, sticky: str | None = None, cached: bool = True) -> str | None:
        """Return the engine for the next call; None when the call should wait.

        Args:
            sticky: The engine that had the trajectory's last call.
            cached: Whether most of the call's prompt is still in that engine's prefix cache.
        """
        bound = self._load_bound()
        entry = self._entries.get(sticky) if sticky is not None and cached else None
        if (
            entry is None
            or not entry.serves
            or entry.num_calls >= entry.max_calls
            or entry.load_tokens > bound
        ):
            entry = self._least_loaded()
        fits = entry is not None and (entry.load_tokens <= bound or not entry.counts)
        return entry.name if entry is not None and fits else None

    def begin_call(self, name: str, *, tokens: int, prefill_tokens: int) -> None:
        """Count a call that can hold `tokens` and needs `prefill_tokens` before its first token."""
        entry = self._entries[name]
        entry.prefill_tokens += prefill_tokens
        entry.num_calls += 1
        self._change(entry, tokens)

    def end_prefill(self, name: str, prefill_tokens: int) -> None:
        """Count a call's prefill as done: its first token came, or it ended without one."""
        entry = self._entries[name]
        was_eligible = self._has_capacity(entry)
        entry.prefill_tokens -= prefill_tokens
        if not was_eligible:
            self._offer(entry)

    def end_call(self, name: str, tokens: int) -> None:
        """Stop counting a call."""
        entry = self._entries[name]
        entry.num_calls -= 1
        self._change(entry, -tokens)

    # -- queries ------------------------------------------------------------------------------------------

    def load_of(self, name: str) -> int:
        """Return the tokens that the calls of an engine can hold at most."""
        return self._entries[name].load_tokens

    def prefill_tokens_of(self, name: str) -> int:
        """Return the tokens that wait on an engine for their call's first token."""
        return self._entries[name].prefill_tokens

    # -- inside -------------------------------------------------------------------------------------------

    def _load_bound(self) -> float:
        return (1.0 + SLACK) * self._counted_tokens / max(1, self._num_counted)

    def _has_capacity(self, entry: _EngineEntry) -> bool:
        if entry.num_calls >= entry.max_calls:
            return False
        limit = self._max_prefill_tokens
        return limit is None or entry.prefill_tokens * entry.num_sharers < limit

    def _set(
        self, entry: _EngineEntry, *, serves: bool | None = None, max_calls: float | None = None
    ) -> None:
        """Let an engine serve or not, or limit its calls; the mean follows."""
        counted = entry.counts
        entry.serves = entry.serves if serves is None else serves
        entry.max_calls = entry.max_calls if max_calls is None else max_calls
        if counted != entry.counts:
            sign = 1 if entry.counts else -1
            self._num_counted += sign
            self._counted_tokens += sign * entry.load_tokens
        self._offer(entry)

    def _change(self, entry: _EngineEntry, tokens: int) -> None:
        entry.load_tokens += tokens
        if entry.counts:
            self._counted_tokens += tokens
        self._offer(entry)

    def _offer(self, entry: _EngineEntry) -> None:
        """Make an engine eligible at its present load."""
        if not entry.serves or not self._has_capacity(entry):
            return
        heapq.heappush(self._heap, (entry.load_tokens, entry.order, entry))
        if len(self._heap) > 8 * len(self._entries) + 64:
            self._heap = [
                (e.load_tokens, e.order, e)
                for e in self._entries.values()
                if e.serves and self._has_capacity(e)
            ]
            heapq.heapify(self._heap)

    def _least_loaded(self) -> _EngineEntry | None:
        while self._heap:
            load, _, entry = self._heap[0]
            known = self._entries.get(entry.name) is entry
            if known and entry.serves and entry.load_tokens == load and self._has_capacity(entry):
                return entry
            heapq.heappop(self._heap)
        return None
