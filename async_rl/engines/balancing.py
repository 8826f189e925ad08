"""Which engine a call goes to: sticky, least loaded, paced. Pure: no clock, no I/O.

```
 a trajectory with a home ─► its home, while that is not overloaded ──┐
 anybody else ─────────────► the least loaded engine with room ───────┼─► overloaded? no room? then wait
```

Load is counted in tokens: what the calls of an engine may hold there at most. Three rules, each against an
avalanche that is seen where they are missing (verl#6533, #7435, #7613):

- **Bounded loads.** No engine is given a call while its load is above `1 + slack` times the mean of the
  engines that serve. A home is kept below that bound, and not only while it is as good as the least loaded:
  an engine that comes back empty draws new trajectories, but not all that have their prefix elsewhere.
- **Paced prefills.** An engine is full while calls of `max_prefill_tokens` and more wait there for their
  first token. After a restart, a failure or an update all calls have everything to prefill: what an engine
  has no room for goes to the next one, or waits here, where it can still be put in order.
- **A cached prefix goes home** also when that is full: elsewhere it would be a prefill itself.

So after each choice `load <= (1 + slack) * mean before + tokens of the call`. One that finds no engine within
the bound waits for room at those below the mean, whose prefills end or fail: waiting ends.

Source of bounded loads: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads",
arXiv:1608.01350, section 1.
"""

from __future__ import annotations

import heapq
from typing import Final

DEFAULT_SLACK: Final = 0.25
"""Above the mean that a home may be and still be kept: a quarter costs little batch efficiency and, at 64
calls an engine, is about two standard deviations of random arrivals."""


class _EngineEntry:
    """What is known of one engine."""

    __slots__ = ("load_tokens", "name", "order", "prefill_tokens", "serves")

    def __init__(self, name: str, order: int) -> None:
        self.name = name
        self.order = order
        self.serves = False
        self.load_tokens = 0
        self.prefill_tokens = 0


class Balancer:
    """Loads of engines, and the choice between them in O(log engines).

    Example:
        >>> balancer = Balancer()
        >>> for name in ("a", "b"):
        ...     balancer.add(name)
        ...     balancer.open(name)
        >>> balancer.begin("a", tokens=100, prefill_tokens=100)
        >>> balancer.choose(), balancer.choose(home="a")
        ('b', 'b')
    """

    def __init__(self, *, max_prefill_tokens: int | None = None, slack: float = DEFAULT_SLACK) -> None:
        """Start without engines.

        Args:
            max_prefill_tokens: Tokens waiting for a first token that make an engine full; None for no limit.
            slack: How far above the mean load an engine may be and still be given calls.
        """
        self._max_prefill_tokens = max_prefill_tokens
        self._slack = slack
        self._places: dict[str, _EngineEntry] = {}
        self._num_added = 0
        self._num_serving = 0
        self._serving_tokens = 0
        # By load, of engines that serve and have room; entries that no longer say the truth are passed over.
        self._heap: list[tuple[int, int, _EngineEntry]] = []

    # -- engines ------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Know an engine; nothing is sent there before `open`."""
        self._places[name] = _EngineEntry(name, self._num_added)
        self._num_added += 1

    def remove(self, name: str) -> None:
        """Forget an engine, and the load it has."""
        self.close(name)
        del self._places[name]

    def open(self, name: str) -> None:
        """It serves."""
        place = self._places[name]
        if not place.serves:
            place.serves = True
            self._num_serving += 1
            self._serving_tokens += place.load_tokens
        self._offer(place)

    def close(self, name: str) -> None:
        """It does not serve; the calls that it has are counted on until they end."""
        place = self._places[name]
        if place.serves:
            place.serves = False
            self._num_serving -= 1
            self._serving_tokens -= place.load_tokens

    # -- calls --------------------------------------------------------------------------------------------

    def choose(self, *, home: str | None = None, cached: bool = True) -> str | None:
        """Where the next call should go; None when it should wait.

        Args:
            home: The engine that had the trajectory's last call.
            cached: Whether most of the call's prompt is still in the home's prefix cache.
        """
        bound = self._bound()
        place = self._places.get(home) if home is not None and cached else None
        if place is not None and place.serves and place.load_tokens <= bound:
            return place.name
        least = self._least()
        return least.name if least is not None and least.load_tokens <= bound else None

    def begin(self, name: str, *, tokens: int, prefill_tokens: int) -> None:
        """A call is sent: it may hold `tokens`, and `prefill_tokens` come before its first token."""
        place = self._places[name]
        place.prefill_tokens += prefill_tokens
        self._change(place, tokens)

    def prefilled(self, name: str, prefill_tokens: int) -> None:
        """Its first token came, or it ended without one."""
        place = self._places[name]
        place.prefill_tokens -= prefill_tokens
        self._offer(place)

    def end(self, name: str, tokens: int) -> None:
        """The call is over."""
        self._change(self._places[name], -tokens)

    # -- what others ask ----------------------------------------------------------------------------------

    def load(self, name: str) -> int:
        """Tokens that the calls of an engine may hold."""
        return self._places[name].load_tokens

    def prefill(self, name: str) -> int:
        """Tokens that wait there for their call's first token."""
        return self._places[name].prefill_tokens

    @property
    def imbalance(self) -> float:
        """Highest load of the engines that serve over their mean; 1 when all are idle. O(engines)."""
        if not self._serving_tokens:
            return 1.0
        highest = max(place.load_tokens for place in self._places.values() if place.serves)
        return highest * self._num_serving / self._serving_tokens

    # -- inside -------------------------------------------------------------------------------------------

    def _bound(self) -> float:
        return (1.0 + self._slack) * self._serving_tokens / max(1, self._num_serving)

    def _has_room(self, place: _EngineEntry) -> bool:
        return self._max_prefill_tokens is None or place.prefill_tokens < self._max_prefill_tokens

    def _change(self, place: _EngineEntry, tokens: int) -> None:
        place.load_tokens += tokens
        if place.serves:
            self._serving_tokens += tokens
        self._offer(place)

    def _offer(self, place: _EngineEntry) -> None:
        """Put an engine up for choice at its present load."""
        if not place.serves or not self._has_room(place):
            return
        heapq.heappush(self._heap, (place.load_tokens, place.order, place))
        if len(self._heap) > 8 * len(self._places) + 64:
            self._heap = [
                (p.load_tokens, p.order, p) for p in self._places.values() if p.serves and self._has_room(p)
            ]
            heapq.heapify(self._heap)

    def _least(self) -> _EngineEntry | None:
        while self._heap:
            load, _, place = self._heap[0]
            known = self._places.get(place.name) is place
            if known and place.serves and place.load_tokens == load and self._has_room(place):
                return place
            heapq.heappop(self._heap)
        return None
