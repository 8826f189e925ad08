"""The driver's side of a worker's leases, whose worker the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from async_rl.engines.pool import EnginePool
from async_rl.rollout.workers.messages import Heartbeat, Message
from async_rl.rollout.workers.relayed_leases import RelayedLeases

LEASE_S = 10.0


def relayed_leases(
    pools: Mapping[str, EnginePool],
    posted: list[Message],
    *,
    worker: str = "rollout-worker-0",
    on_lease: Callable[[str, int | None], None] = lambda key, version: None,
    stall_s: float = 30.0,
) -> RelayedLeases:
    """Return leases of a worker that has sent its first heartbeat; what the driver posts is appended."""
    leases = RelayedLeases(
        worker,
        pools,
        posted.append,
        lease_s=LEASE_S,
        clock=asyncio.get_running_loop().time,
        on_lease=on_lease,
        probe_timeout_s=5.0,
        worker_stall_s=stall_s,
    )
    leases.renew(Heartbeat(number=1))
    return leases
