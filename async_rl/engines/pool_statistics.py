"""Statistics of the engines of a pool: loads, imbalance and idle time, for health checks and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from async_rl.engines.balancing import Balancer
from async_rl.engines.lease import EngineLoad, EngineSlot
from async_rl.engines.revocation import LeaseHolder


class PoolStatistics:
    """Reads what the calls of a pool's engines say about their load. Changes nothing but the idle clock."""

    def __init__(
        self,
        slots: Mapping[str, EngineSlot],
        balancer: Balancer,
        holders: Collection[LeaseHolder],
        clock: Callable[[], float],
    ) -> None:
        """Count idle time from now on.

        Args:
            slots: The engines of the pool by id; the pool adds and removes them.
            balancer: The loads of the same engines.
            holders: The processes that make calls under leases of the pool.
            clock: Monotonic seconds.
        """
        self._slots = slots
        self._balancer = balancer
        self._holders = holders
        self._clock = clock
        self._started_s = clock()

    def load_of(self, engine_id: str) -> EngineLoad:
        """Return what the calls of an engine say about its load and health."""
        return self.loads([engine_id])[engine_id]

    def loads(self, engine_ids: Iterable[str]) -> dict[str, EngineLoad]:
        """Return the same of several engines by id."""
        silent = {holder for holder in self._holders if holder.is_silent}
        return {
            engine_id: self._slots[engine_id].load(self._balancer.prefill_tokens_of(engine_id), silent)
            for engine_id in engine_ids
        }

    def progress_s_of(self, engine_id: str) -> float:
        """Return when an engine last sent anything: `EngineLoad.progress_s`."""
        return self._slots[engine_id].progress_s

    @property
    def imbalance(self) -> float:
        """Highest load of a serving engine over the mean; 1 when all are idle."""
        return self._balancer.imbalance

    @property
    def idle_share(self) -> float:
        """Share of the engines' time without any call, since the pool was created or the clock restarted."""
        now = self._clock()
        elapsed = (now - self._started_s) * max(1, len(self._slots))
        idle = sum(
            slot.idle_s + (now - slot.idle_since if slot.idle_since is not None else 0.0)
            for slot in self._slots.values()
        )
        return idle / elapsed if elapsed > 0 else 0.0

    def restart_idle_clock(self) -> None:
        """Count idle time from now on: the time that engines take to start is not idle time."""
        self._started_s = self._clock()
        for slot in self._slots.values():
            slot.idle_s = 0.0
            slot.idle_since = self._started_s if not slot.num_calls else None
