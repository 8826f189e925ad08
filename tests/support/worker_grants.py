"""The driver's side of a worker's grants, whose worker the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from async_rl.engines.pool import EnginePool, EngineState
from async_rl.rollout.workers.messages import (
    EngineReport,
    EnginesReleased,
    EngineUse,
    GrantedEngine,
    GrantEngines,
    Heartbeat,
    Message,
    RevokeEngines,
)
from async_rl.rollout.workers.worker_grants import WorkerGrants


class PlayedWorker:
    """A worker as the driver knows it: it does what the test says."""

    def __init__(
        self,
        pools: Mapping[str, EnginePool],
        *,
        name: str = "rollout-worker-0",
        stall_s: float = 30.0,
        on_revoke: Callable[[int], None] = lambda version: None,
    ) -> None:
        self.posted: list[Message] = []
        """What the driver has sent."""
        self.clock = asyncio.get_running_loop().time
        self.pools = pools
        self.grants = WorkerGrants(
            name,
            pools,
            self.posted.append,
            clock=self.clock,
            on_revoke=on_revoke,
            worker_stall_s=stall_s,
        )
        self._num_heartbeats = 0

    async def beat(
        self, *engines: EngineUse, reports: Sequence[EngineReport] = (), hears: bool = True
    ) -> None:
        """Send a heartbeat, and let the driver answer it."""
        self._num_heartbeats += 1
        heartbeat = Heartbeat(number=self._num_heartbeats, engines=engines, reports=tuple(reports))
        self.grants.renew(heartbeat, hears=hears)
        await asyncio.sleep(0.01)

    async def keep_beating(self, *engines: EngineUse) -> None:
        """Send heartbeats; never returns."""
        while True:
            await self.beat(*engines)
            await asyncio.sleep(0.25)

    def report(
        self, engine_id: str, kind: str, text: str = "x", *, wrong_weights: bool = False
    ) -> EngineReport:
        """What a call says against an engine under its present grant."""
        snapshot = next(s for pool in self.pools.values() if (s := pool.snapshot_of(engine_id)))
        return EngineReport(
            engine_id=engine_id,
            restart_count=snapshot.restart_count,
            epoch=snapshot.epoch,
            kind=kind,  # type: ignore[arg-type]
            text=text,
            wrong_weights=wrong_weights,
        )

    def release(self, *ended: str) -> None:
        """Say that nothing more is sent to engines that were revoked last, and that calls have ended."""
        self.grants.record_release(EnginesReleased(number=self.revocations[-1].number, ended=ended))

    @property
    def revocations(self) -> list[RevokeEngines]:
        return [message for message in self.posted if isinstance(message, RevokeEngines)]

    @property
    def granted(self) -> list[GrantedEngine]:
        """All grants so far."""
        return [
            each for message in self.posted if isinstance(message, GrantEngines) for each in message.engines
        ]


def use(engine_id: str, calls: int = 1, *, quiet_s: float = 0.0, payload: bool = False) -> EngineUse:
    """The load of an engine by a worker's calls."""
    return EngineUse(
        engine_id=engine_id,
        calls=calls,
        tokens=100 * calls,
        prefill_tokens=0,
        quiet_s=quiet_s,
        accepted_s=None,
        heard_s=quiet_s,
        payload_arrives=payload,
    )


def serving(pool: EnginePool) -> list[str]:
    """The engines that serve."""
    return [engine.engine_id for engine in pool.engines(EngineState.SERVING)]
