"""A small simulated run that is independent of what seeds draw, with recurring faults."""

from __future__ import annotations

import msgspec

from async_rl.config import parse_config
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import Death, Ending, Injection, Scenario, Speeds, draw


def small_run(
    seed: int,
    faults: tuple[FaultKind, ...] = (),
    death: Ending | None = None,
    *,
    interrupt: str = "abort",
    merge: str = "replace",
) -> Scenario:
    """Two engines, five steps; a fault every 80 callbacks; the first two incarnations end by `death`.

    Power is cut after a checkpoint, which other deaths come before.

    Its tasks are those of the seed, without their failures.
    """
    drawn = draw(seed)
    tree = {
        "run": {"name": "run", "seed": seed, "max_steps": 5, "keep_trajectories": 0, "drain_s": 0.5},
        "model": {"path": "model"},
        "data": {"path": "tasks"},
        "engine": {
            "kind": "simulated",
            "decode_step_s": 0.02,
            "mean_new_tokens": 10,
            "max_restarts": 1000,
        },
        "rollout": {
            "agent_loop": "verification.simulation.users:TurnsLoop",
            "reward": "verification.simulation.users:reward",
            "group_size": 2,
            "max_concurrent_trajectories": 8,
            "max_staleness": 2,
            "max_context_tokens": 160,
            "max_new_tokens": 60,
            "max_failed_share": 1.0,
        },
        "routing": {"merge": merge},
        "weights": {"interrupt": interrupt},
        "queue": {"journal_s": 0.1},
        "trainer": {"groups_per_batch": 2, "checkpoint_every": 2, "max_restarts": 100},
    }
    return msgspec.structs.replace(
        drawn,
        config=parse_config(tree),
        constants={"async_rl.engines.repair.RESTART_DELAY_S": 0.1},
        tasks=tuple(
            msgspec.structs.replace(task, metadata={**task.metadata, "trouble": None}) for task in drawn.tasks
        ),
        speeds=Speeds(train_s=0.3, update_s=0.05, restart_s=0.1, latency_s=0.0, thread_s=0.02),
        injections=tuple(
            Injection(step=100 + 80 * i, kind=faults[i % len(faults)], engine=i, amount=0.3)
            for i in range(20 if faults else 0)
        ),
        deaths=(Death(kind=death, after=1600 if death == "power_cut" else 700),) * 2 if death else (),
    )
