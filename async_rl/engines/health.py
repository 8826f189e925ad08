"""Checks that engines are alive: by the progress of their calls, and by probing idle ones.

```
 loop    consumes              waits for          unblocked by   produces
 run     loads of the engines  the next check     time           a quarantine, a dropped call, probes
 probe   a silent engine       its answer         it, a limit    a miss; after several a quarantine
```

An engine that streams is alive, so it is not probed. Three things look like a stall and must not cost an
engine (sglang#22511): a call may wait in the engine's queue for as long as others continue, prefills pause
the streams of an engine for as long as they take, and after a pause of our own event loop, what arrived
meanwhile has not been read yet.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final, Literal

from async_rl.config import EnginesConfig, SGLangEngines
from async_rl.engine_protocol import Engine, EngineHealth
from async_rl.engines.granted_engines import GrantedEngines
from async_rl.engines.lease import EngineLoad
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import CallLost, EngineBusy, EngineError, EngineTimeout, LocalShortage, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.runtime.devices import detect_device
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import sleep_idle, waiting

log = logging.getLogger(__name__)

Finding = Literal["silent", "call", "overtaken"]
"""silent: no call of the engine makes progress.  call: one makes none, though others do.
overtaken: one never began, though others that were sent later did.
"""

MIN_PREFILL_TOKENS_PER_S: Final = 500.0
"""Slowest prefill that is no stall: a tenth of what engines on GPUs show for the longest prompts."""

_CHECKS_PER_STALL: Final = 8
"""So that a stall is found at most an eighth of `engine.stall_s` late."""

_COMPILE_S: Final = 300.0
"""Longest time that an engine on a GPU compiles kernels in its first call."""

PROBE_S: Final = 10.0
"""Interval of probes to an engine that sends nothing: a stopped server is found within `engine.stall_s`."""

PROBE_TIMEOUT_S: Final = 10.0
"""Longest answer to a probe: a server that handles a long prompt answers within seconds."""

PROBE_MISSES: Final = 3
"""Probes in a row without an answer after which an engine has failed: one or two are lost under load."""

_CHECKS_PER_PROBE: Final = 4
"""So that a probe is at most a quarter of `PROBE_S` late."""


def first_call_limit(config: EnginesConfig) -> float:
    """Return the time in which engines compile kernels before their first token, seconds: none on a CPU."""
    on_gpu = isinstance(config, SGLangEngines) and config.device != "cpu" and detect_device() == "cuda"
    return _COMPILE_S if on_gpu else 0.0


def find_stall(load: EngineLoad, now: float, stall_s: float, first_call_s: float = 0.0) -> Finding | None:
    """Return what stalls on a serving engine, by the progress of this process's calls.

    Args:
        load: Its load, and when its calls last made progress.
        now: The time on the same clock.
        stall_s: `engine.stall_s`, extended by the longest time that the engine's prefills can take.
        first_call_s: Added before the engine's first token, for the time in which it compiles kernels.

    Returns:
        None while nothing is wrong, or while it is too early to tell.
    """
    if not load.calls:
        return None
    limit_s = stall_s + load.prefill_tokens / MIN_PREFILL_TOKENS_PER_S
    if not load.has_answered:
        limit_s += first_call_s
    if now - load.progress_s > limit_s:
        return "silent"
    # All streams decode together; time in which none did (prefills go first) does not count.
    if load.silent_since_s is not None and load.decode_s - load.silent_since_s > limit_s:
        return "call"
    if load.overtaken_s is not None and now - load.overtaken_s > limit_s:
        return "overtaken"
    return None


def end_stalls(
    engines: GrantedEngines, metrics: Metrics, now: float, stall_s: float, first_call_s: float
) -> None:
    """Move calls that an engine has forgotten, and report engines that are silent."""
    for engine_id in list(engines.serving):
        slot, load = engines.slots[engine_id], engines.load_of(engine_id)
        assert load is not None, "it has a slot"
        finding = find_stall(load, now, stall_s, first_call_s)
        if finding is None:
            continue
        metrics.engine_stalls_total.labels(engine_id, finding).inc()
        if finding == "call" and slot.silent_call is not None:
            log.warning("engine %s has forgotten a stream: the call moves with its tokens", engine_id)
            slot.silent_call.drop(CallLost(f"engine {engine_id} went on with other calls only"))
        elif finding == "overtaken" and slot.queued_call is not None:
            log.warning("engine %s has forgotten a call in its queue: it moves", engine_id)
            slot.queued_call.drop(CallLost(f"engine {engine_id} took later calls instead"))
        else:
            engines.judge.quarantine_engine(
                engine_id,
                EngineTimeout(
                    f"engine {engine_id} sent nothing for {now - load.progress_s:.1f} s to {load.calls} "
                    f"calls, with {load.prefill_tokens} tokens to prefill; engine.stall_s is {stall_s}"
                ),
            )


async def watch_calls(
    engines: GrantedEngines,
    config: EnginesConfig,
    metrics: Metrics,
    clock: Callable[[], float],
    also: Callable[[], None] | None = None,
) -> None:
    """End what stalls on the engines that this process calls; never returns.

    Args:
        engines: The engines.
        config: Time limits.
        metrics: Stalls by engine.
        clock: Monotonic seconds.
        also: Called after each check.
    """
    interval_s, first_call_s = _interval_s(config), first_call_limit(config)
    while True:
        expected_s = clock() + interval_s
        await sleep_idle(interval_s)
        late_s = clock() - expected_s
        if late_s > interval_s:
            log.warning("the event loop stalled for %.1f s: this health check is skipped", late_s)
            continue
        end_stalls(engines, metrics, clock(), config.stall_s, first_call_s)
        if also is not None:
            also()


def _interval_s(config: EnginesConfig) -> float:
    return min(PROBE_S / _CHECKS_PER_PROBE, config.stall_s / _CHECKS_PER_STALL)


async def ask_health(engine: Engine) -> EngineHealth:
    """Ask an engine for its health.

    Raises:
        EngineError: It cannot be reached, or does not answer as an engine does.
        TimeoutError: It does not answer in time.
    """
    async with (
        asyncio.timeout(PROBE_TIMEOUT_S) as scope,
        waiting("engine", engine.engine_id, scope=scope),
    ):
        return await engine.health()


class HealthWatch:
    """Checks all engines of a pool periodically."""

    def __init__(
        self, pool: EnginePool, config: EnginesConfig, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Wire the parts.

        Args:
            pool: The engines.
            config: Time limits.
            metrics: Stalls by engine, and the load imbalance.
            clock: Monotonic seconds.
        """
        self._pool = pool
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._probed_s: dict[str, float] = {}
        """By engine: when its last probe was sent."""
        self._misses: dict[str, int] = {}
        self._probing: set[str] = set()

    async def watch_engines(self) -> None:
        """Check the engines until cancelled."""
        async with Nursery() as probes:

            def check() -> None:
                self._metrics.engine_load_imbalance.set(self._pool.imbalance)
                self._start_probes(probes)

            await watch_calls(self._pool.own, self._config, self._metrics, self._clock, check)

    def _start_probes(self, probes: Nursery) -> None:
        now = self._clock()
        for engine in self._pool.engines(EngineState.SERVING, EngineState.UPDATING):
            engine_id = engine.engine_id
            progress_s = self._pool.load_of(engine_id).progress_s
            quiet_s = now - max(progress_s, self._probed_s.get(engine_id, -math.inf))
            if quiet_s >= PROBE_S and engine_id not in self._probing:
                self._probing.add(engine_id)
                probes.start_task(f"probe {engine_id}", self._probe_engine(engine))

    async def _probe_engine(self, engine: Engine) -> None:
        """Ask one engine for its health; several misses in a row quarantine it."""
        engine_id, probed_s = engine.engine_id, self._clock()
        before = self._pool.snapshot_of(engine_id)
        try:
            health = await ask_health(engine)
        except EngineBusy:
            self._misses.pop(engine_id, None)  # it answers; calls show whether it does more than refuse
        except LocalShortage as error:
            log.warning("engine %s was not probed: %s", engine_id, error)
        except (EngineError, TimeoutError) as error:
            self._record_miss(engine_id, probed_s, error)
        else:
            self._misses.pop(engine_id, None)
            snapshot = self._pool.snapshot_of(engine_id)
            if snapshot is None or snapshot != before or snapshot.state is not EngineState.SERVING:
                return  # it was restarted or updated meanwhile, so the answer is out of date
            if health.weight_version != snapshot.weight_version:
                self._pool.quarantine_engine(
                    engine_id,
                    VersionMismatch(
                        f"engine {engine_id} serves weight version {health.weight_version}, it was brought "
                        f"to {snapshot.weight_version}"
                    ),
                )
        finally:
            self._probing.discard(engine_id)
            self._probed_s[engine_id] = probed_s

    def _record_miss(self, engine_id: str, probed_s: float, error: Exception) -> None:
        progress_s = self._pool.load_of(engine_id).progress_s if engine_id in self._pool else math.inf
        if progress_s > self._probed_s.get(engine_id, -math.inf):
            self._misses.pop(engine_id, None)  # it has streamed since the probe before: that one says nothing
        if progress_s > probed_s:
            return  # it was busy with its calls
        misses = self._misses[engine_id] = self._misses.get(engine_id, 0) + 1
        why = str(error) or f"no answer within {PROBE_TIMEOUT_S} s"
        log.warning("engine %s, missed probe %d of %d: %s", engine_id, misses, PROBE_MISSES, why)
        if misses >= PROBE_MISSES:
            del self._misses[engine_id]
            self._metrics.engine_stalls_total.labels(engine_id, "unreachable").inc()
            self._pool.quarantine_engine(
                engine_id, EngineTimeout(f"engine {engine_id} did not answer {misses} times: {why}")
            )
