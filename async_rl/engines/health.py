"""Whether engines are alive: by what their calls say, and by asking those that say nothing.

```
 loop    consumes             waits for          unblocked by   produces
 run     vitals of the pool   the next look      time           a quarantine, a dropped call, probes
 probe   a silent engine      its answer         it, a limit    a miss; after several a quarantine
```

A chunk is the best sign of life, so an engine that streams is not asked. What looks like a stall and is none
must not cost an engine (sglang#22511): a call may wait in the engine's queue for as long as others go on,
prefills stop the streams of an engine for as long as they take, and when our own event loop stood still, what
came meanwhile has not been read yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal

from async_rl.config import EnginesConfig
from async_rl.engine_protocol import Engine
from async_rl.engines.lease import EngineLoad, EngineState
from async_rl.engines.pool import EnginePool
from async_rl.errors import EngineError, EngineTimeout, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

Finding = Literal["silent", "call", "overtaken"]
"""silent: no call of the engine goes on.  call: one does not, though others do.
overtaken: one never began, though others that were sent later did.
"""

_LOOKS_PER_STALL: Final = 8
"""So that a stall is found at most an eighth of `engine.stall_s` late."""

_LOOKS_PER_PROBE: Final = 4
"""So that a probe is at most a quarter of `engine.probe_s` late."""


def judge(vitals: EngineLoad, now: float, config: EnginesConfig) -> Finding | None:
    """What the calls of a serving engine say of it.

    Args:
        vitals: What they did last.
        now: On the same clock.
        config: `stall_s`, extended by the time that what the engine has to prefill may take.

    Returns:
        None while nothing is wrong, or while nothing can be said.
    """
    if not vitals.calls:
        return None
    patience_s = config.stall_s + vitals.prefill_tokens / config.min_prefill_tokens_per_s
    if now - vitals.progress_s > patience_s:
        return "silent"
    # Decoding goes on for all streams together; time in which none did (prefills go first) does not count.
    if vitals.silent_since_s is not None and vitals.decode_s - vitals.silent_since_s > patience_s:
        return "call"
    if vitals.overtaken_s is not None and now - vitals.overtaken_s > patience_s:
        return "overtaken"
    return None


class HealthWatch:
    """Looks at all engines of a pool, again and again.

    Example:
        >>> async with services(health=HealthWatch(pool, config.engine, metrics, clock).run): ...
    """

    def __init__(
        self, pool: EnginePool, config: EnginesConfig, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Wire the parts."""
        self._pool = pool
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._look_s = min(config.probe_s / _LOOKS_PER_PROBE, config.stall_s / _LOOKS_PER_STALL)
        self._asked_s: dict[str, float] = {}
        self._misses: dict[str, int] = {}
        self._probing: set[str] = set()

    async def run(self) -> None:
        """Never returns."""
        async with Nursery() as probes:
            while True:
                expected = self._clock() + self._look_s
                with waiting("idle"):
                    await asyncio.sleep(self._look_s)
                late_s = self._clock() - expected
                if late_s > self._look_s:
                    log.warning("the event loop stood still for %.1f s: no engine is judged by that", late_s)
                    continue
                self._look()
                self._start_probes(probes)

    def _look(self) -> None:
        self._metrics.engine_load_imbalance.set(self._pool.imbalance)
        for engine in self._pool.engines(EngineState.SERVING):
            engine_id = engine.engine_id
            vitals = self._pool.vitals(engine_id)
            finding = judge(vitals, self._clock(), self._config)
            if finding is None:
                continue
            self._metrics.engine_stalls_total.labels(engine_id, finding).inc()
            if finding == "silent":
                silent_s = self._clock() - vitals.progress_s
                self._pool.quarantine(
                    engine_id,
                    EngineTimeout(
                        f"engine {engine_id} says nothing for {silent_s:.1f} s to {vitals.calls} calls, with "
                        f"{vitals.prefill_tokens} tokens to prefill; engine.stall_s is {self._config.stall_s}"
                    ),
                )
            elif finding == "call":
                log.warning("engine %s has forgotten a stream: the call moves with its tokens", engine_id)
                self._pool.drop_silent_call(engine_id, f"engine {engine_id} went on with other calls only")
            else:
                log.warning("engine %s has forgotten a call in its queue: it moves", engine_id)
                self._pool.drop_overtaken_call(engine_id, f"engine {engine_id} took later calls instead")

    def _start_probes(self, probes: Nursery) -> None:
        now = self._clock()
        for engine in self._pool.engines(EngineState.SERVING, EngineState.UPDATING):
            engine_id = engine.engine_id
            quiet_s = now - max(
                self._pool.vitals(engine_id).progress_s, self._asked_s.get(engine_id, float("-inf"))
            )
            if quiet_s >= self._config.probe_s and engine_id not in self._probing:
                self._probing.add(engine_id)
                probes.start_task(f"probe {engine_id}", self._probe(engine))

    async def _probe(self, engine: Engine) -> None:
        """Ask one engine; several misses in a row quarantine it."""
        engine_id, asked_s = engine.engine_id, self._clock()
        before = self._pool.standing_of(engine_id)
        try:
            async with (
                asyncio.timeout(self._config.probe_timeout_s) as scope,
                waiting("engine", engine_id, scope=scope),
            ):
                health = await engine.health()
        except (EngineError, TimeoutError) as error:
            self._missed(engine_id, asked_s, error)
        else:
            self._misses.pop(engine_id, None)
            # Somebody else has restarted or updated it.
            standing = self._pool.standing_of(engine_id)
            if standing is None or standing != before or standing.state is not EngineState.SERVING:
                return  # what it said is of another time
            if health.weight_version != standing.weight_version:
                self._pool.quarantine(
                    engine_id,
                    VersionMismatch(
                        f"engine {engine_id} serves weight version {health.weight_version}, it was brought "
                        f"to {standing.weight_version}"
                    ),
                )
        finally:
            self._probing.discard(engine_id)
            self._asked_s[engine_id] = asked_s

    def _missed(self, engine_id: str, asked_s: float, error: Exception) -> None:
        if engine_id not in self._pool or self._pool.vitals(engine_id).progress_s > asked_s:
            self._misses.pop(engine_id, None)  # it was busy with its calls
            return
        misses = self._misses[engine_id] = self._misses.get(engine_id, 0) + 1
        why = str(error) or f"no answer within engine.probe_timeout_s = {self._config.probe_timeout_s}"
        log.warning("engine %s, missed probe %d of %d: %s", engine_id, misses, self._config.probe_misses, why)
        if misses >= self._config.probe_misses:
            del self._misses[engine_id]
            self._metrics.engine_stalls_total.labels(engine_id, "unreachable").inc()
            self._pool.quarantine(
                engine_id, EngineTimeout(f"engine {engine_id} did not answer {misses} times: {why}")
            )
