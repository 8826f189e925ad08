"""The table of all faults. Seeds and the soak draw from it, and both print their counts in its order.

To add a fault, add a row with a `share` and implement it where its family is injected (`FAMILIES`). The row
draws from a random stream of its own, so other seeds keep their faults. Call `InvariantChecker.met`
(`count_fault` in user code) where the fault takes effect: a fault that never took effect is not counted.
"""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

FaultKind = str
"""A key of `FAULTS`."""

Family = Literal[
    "call",
    "refusal",
    "update",
    "engine",
    "memory",
    "trainer",
    "offload",
    "disk",
    "clock",
    "worker",
    "model",
    "user",
    "driver",
]

Setting = Literal["any", "shared", "workers", "models"]


class FaultRow(msgspec.Struct, frozen=True):
    """One kind of fault."""

    family: Family
    """Decides which object injects it."""
    description: str
    share: float | None = None
    """Share of the seeds that have this fault, drawn from its own stream. None for the first faults, which
    share one stream, and for those that the scenario draws elsewhere."""
    only: Setting = "any"
    """Where it can happen: on devices that engines and trainer share, with rollout workers, or with teachers
    and judges."""


FAMILIES: Final[dict[Family, str]] = {
    "call": "`FaultyEngine.inject`: the next call of an engine",
    "refusal": "`FaultyEngine.inject`: all calls of an engine, for a while",
    "update": "`FaultyEngine.inject`: the next weight update of an engine",
    "engine": "`FaultyEngine.inject`: an engine, at once",
    "memory": "`FaultyEngine.inject`: an engine's next release or return of device memory",
    "trainer": "`SimulatedTrainer.faults`",
    "offload": "`SimulatedTrainer.faults`",
    "disk": "`Simulation._inject`",
    "clock": "`Simulation._inject`",
    "worker": "`SimulatedCluster.inject`",
    "model": "`SimulatedCluster.inject`: an engine of a teacher or judge",
    "user": "`users.TurnsLoop`, `users.reward`: a task's `metadata['trouble']`",
    "driver": "`Simulation._die`: a `Death`",
}
"""Where the faults of a family are injected."""

FAULTS: Final[dict[FaultKind, FaultRow]] = {
    "die_in_call": FaultRow("call", "the engine dies during a call"),
    "hang": FaultRow("call", "a call goes silent and ends in a timeout"),
    "wrong_rows": FaultRow("call", "a call returns one routing row too many"),
    "wrong_mask": FaultRow("call", "a sampling mask excludes its token", 0.2),
    "nan": FaultRow("call", "a log-prob is NaN"),
    "lose": FaultRow("call", "a chunk is lost"),
    "repeat": FaultRow("call", "a chunk arrives twice"),
    "disconnect": FaultRow("call", "the connection is lost, the engine is well"),
    "refuse_flush": FaultRow("update", "the engine refuses to flush its cache at first"),
    "partial_update": FaultRow("update", "an update fails halfway"),
    "late_error": FaultRow("update", "an update is applied and reports an error"),
    "no_op_update": FaultRow("update", "an update reports success and is not applied"),
    "hang_update": FaultRow("update", "an update is never answered"),
    "die_in_update": FaultRow("update", "the engine dies during an update"),
    "hold_all": FaultRow("update", "the next update of every engine takes up to 15 s longer", 0.1),
    "refuse_first": FaultRow(
        "update",
        "an engine serves up to 15 s before the others after an update, and answers 400 to calls until then",
        0.15,
    ),
    "die": FaultRow("engine", "an engine is killed; its watcher notices"),
    "die_unseen": FaultRow("engine", "an engine is killed; no watcher notices"),
    "freeze": FaultRow("engine", "an engine answers nothing for 0.1 s to 1000 s"),
    "slow": FaultRow("engine", "an engine decodes 20 times as slowly"),
    "fail_restarts": FaultRow("engine", "the next restarts of an engine fail"),
    "refuse_calls": FaultRow("refusal", "an engine answers 401, 404 or 500 to calls until restarted", 0.1),
    "refuse_requests": FaultRow(
        "refusal", "an engine answers 400 to calls, as to wrong requests, for up to 10 s", 0.1
    ),
    "too_busy": FaultRow("refusal", "an engine takes at most 3 calls and answers 429 to others", 0.1),
    "no_descriptors": FaultRow("refusal", "the driver has no descriptors for connections", 0.1),
    "step_fails": FaultRow("trainer", "a trainer step fails"),
    "step_is_nan": FaultRow("trainer", "the loss is NaN"),
    "step_is_slow": FaultRow("trainer", "a trainer step takes ten times as long"),
    "checkpoint_fails": FaultRow("trainer", "a checkpoint cannot be written"),
    "publish_fails": FaultRow("trainer", "weights cannot be published"),
    "disk_full": FaultRow("disk", "the disk is full for a while"),
    "no_files": FaultRow("disk", "the driver has no descriptors for files for up to 10 s", share=0.1),
    "corrupt_frame": FaultRow("disk", "a bit of a queued frame flips"),
    "unreadable_file": FaultRow(
        "disk", "a frame or a journal on disk cannot be opened any more: EIO, ESTALE or EACCES", 0.15
    ),
    "clock_jump": FaultRow("clock", "the clock jumps by 10 ms to 100 s"),
    "refuse_memory": FaultRow("memory", "an engine refuses to change its device memory", only="shared"),
    "hang_memory": FaultRow("memory", "a change of device memory is never answered", only="shared"),
    "offload_fails": FaultRow("offload", "the trainer cannot move its memory to the host", only="shared"),
    "reload_fails": FaultRow("offload", "the trainer cannot take its memory back", only="shared"),
    "stuck_payload": FaultRow(
        "call",
        "routing payloads stop in the middle for 0.1 s to 100 s; other requests are answered",
        share=0.15,
    ),
    "slow_payload": FaultRow("call", "a routing payload takes up to 40 s, and arrives steadily", share=0.15),
    "retract": FaultRow("call", "an engine takes a call's memory and prefills the call again", share=0.3),
    "kill_worker": FaultRow("worker", "a rollout worker is killed", only="workers"),
    "mute_worker": FaultRow("worker", "a rollout worker falls silent", only="workers"),
    "deafen_worker": FaultRow(
        "worker", "a rollout worker handles no more messages, and its heartbeats go on", 0.2, only="workers"
    ),
    "cut_off_worker": FaultRow("worker", "a rollout worker is cut off from the driver", only="workers"),
    "delay_worker": FaultRow(
        "worker",
        "messages between the driver and a rollout worker take up to 15 s longer for once",
        0.4,
        only="workers",
    ),
    "isolate_worker": FaultRow(
        "worker",
        "a rollout worker reaches no engine for up to 30 s, while the driver does",
        0.3,
        only="workers",
    ),
    "kill_after_frame": FaultRow(
        "worker", "a rollout worker is killed between a frame and its report", 0.4, only="workers"
    ),
    "worker_disk_full": FaultRow(
        "worker", "rollout workers find no space for frames for up to 100 s", 0.3, only="workers"
    ),
    "node_disk_full": FaultRow(
        "worker", "rollout workers of one node find no space for frames for up to 100 s", 0.3, only="workers"
    ),
    "lose_message": FaultRow(
        "worker", "a message between the driver and a rollout worker is lost", 0.3, only="workers"
    ),
    "repeat_message": FaultRow(
        "worker", "messages between the driver and a rollout worker arrive twice", 0.3, only="workers"
    ),
    "reorder_messages": FaultRow(
        "worker", "a message between the driver and a rollout worker overtakes another", 0.3, only="workers"
    ),
    "late_request": FaultRow(
        "worker",
        "a rollout worker's request reaches its engine after its caller has left",
        0.4,
        only="workers",
    ),
    "node_lost": FaultRow(
        "worker", "a node is lost with its rollout workers and their frames", 0.4, only="workers"
    ),
    "node_wiped": FaultRow(
        "worker",
        "a node loses its rollout workers and its disk, and is back at once with an empty one",
        0.3,
        only="workers",
    ),
    "node_absent": FaultRow(
        "worker", "what reads the frames on a node does not answer for up to 100 s", 0.3, only="workers"
    ),
    "kill_model": FaultRow("model", "an engine of a teacher or judge is killed", 0.6, only="models"),
    "lose_model": FaultRow(
        "model", "an engine of a teacher or judge is killed, and no watcher notices", 0.4, only="models"
    ),
    "fail_model": FaultRow(
        "model", "an engine of a teacher or judge is killed, and its next restarts fail", 0.3, only="models"
    ),
    "busy_model": FaultRow("model", "an engine of a teacher or judge refuses calls", 0.3, only="models"),
    "raise": FaultRow("user", "the agent loop raises"),
    "hang_loop": FaultRow("user", "the agent loop hangs"),
    "silent": FaultRow("user", "the agent loop returns without a turn"),
    "too_long": FaultRow("user", "a tool's result overfills the context"),
    "flaky_reward": FaultRow("user", "the reward raises"),
    "slow_reward": FaultRow("user", "the reward takes too long"),
    "slow_tool": FaultRow("user", "a tool exceeds its limit"),
    "split_stop": FaultRow("user", "an interruption splits a stop string of the agent loop", share=0.15),
    "bad_message": FaultRow("user", "the agent loop adds what no chat template renders", share=0.1),
    "bad_return": FaultRow("user", "the agent loop returns a reward, a number or a mapping", share=0.1),
    "bad_reward": FaultRow("user", "the reward returns no finite number", share=0.1),
    "exit": FaultRow("user", "the agent loop calls sys.exit", share=0.1),
    "leak_cancel": FaultRow("user", "the agent loop raises CancelledError by itself", share=0.1),
    "swallow_cancel": FaultRow("user", "the agent loop goes on when it is cancelled", share=0.2),
    "kill": FaultRow("driver", "the driver is killed between two callbacks"),
    "kill_on_disk": FaultRow("driver", "the driver is killed inside a disk operation"),
    "power_cut": FaultRow("driver", "the driver's machine loses power, and writes that were not synced", 0.3),
    "cancel": FaultRow("driver", "the driver is cancelled (2nd Ctrl-C)"),
    "stop": FaultRow("driver", "the driver is stopped by a signal and resumed"),
}


def kinds_of(*families: Family) -> tuple[FaultKind, ...]:
    """Return the faults of these families, in the order of the table."""
    return tuple(kind for kind, row in FAULTS.items() if row.family in families)


ENGINE_FAULTS: Final = frozenset(kinds_of("call", "refusal", "update", "engine", "memory", "model"))
"""Faults of engines and of the network to them."""

TRAINER_FAULTS: Final = frozenset(kinds_of("trainer", "offload"))

WORKER_FAULTS: Final = frozenset(kinds_of("worker")) - {
    "repeat_message",
    "worker_disk_full",
    "node_disk_full",
}
"""Faults that end a rollout worker or its link, and what it had reported last."""

SHARED_STREAM: Final = tuple(
    kind
    for kind in kinds_of("call", "update", "engine", "trainer", "disk", "clock")
    if FAULTS[kind].share is None
)
"""The first faults: drawn together from the stream of the scenario. No row joins them."""


def own_streams(seed: int, setting: Setting = "any") -> list[tuple[FaultKind, random.Random]]:
    """Return the faults with a stream of their own that a seed has, each with its stream.

    Example:
        >>> for kind, rng in own_streams(seed=7):
        ...     Injection(step=rng.randrange(5000), kind=kind, engine=rng.randrange(12), amount=rng.random())
    """
    drawn = []
    for kind, row in FAULTS.items():
        if row.share is not None and row.only == setting:
            rng = random.Random(f"{kind} {seed}")
            if rng.random() < row.share:
                drawn.append((kind, rng))
    return drawn


def fault_table(times: dict[str, int], seeds: dict[str, int] | None = None) -> list[str]:
    """Return the table of all faults: how often each happened, and in how many seeds."""
    header = f"{'fault':<18}{'family':<9}{'happened':>9}" + (f"{'in seeds':>10}" if seeds is not None else "")
    lines = [header + "  what happens"]
    for kind, row in FAULTS.items():
        line = f"{kind:<18}{row.family:<9}{times.get(kind, 0):>9}"
        line += f"{seeds.get(kind, 0):>10}" if seeds is not None else ""
        lines.append(f"{line}  {row.description}")
    return lines
