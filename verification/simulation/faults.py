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

Promise = Literal[
    "conservation",
    "once",
    "staleness",
    "versions",
    "tokens",
    "routing",
    "progress",
    "blame",
    "records",
    "devices",
]


class FaultRow(msgspec.Struct, frozen=True):
    """One kind of fault."""

    family: Family
    """Decides which object injects it."""
    attacks: tuple[Promise, ...]
    """The promises that it would break first."""
    description: str
    share: float | None = None
    """Share of the seeds that have this fault, drawn from its own stream. None for the first faults, which
    share one stream, and for those that the scenario draws elsewhere."""

    @property
    def only(self) -> Setting:
        """Where it can happen: on shared devices, with rollout workers, with models, or anywhere."""
        return _ONLY.get(self.family, "any")


_ONLY: Final[dict[Family, Setting]] = {
    "memory": "shared",
    "offload": "shared",
    "worker": "workers",
    "model": "models",
}


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

PROMISES: Final[dict[Promise, str]] = {
    "conservation": "every trajectory is settled exactly once, and no task is skipped",
    "once": "no trajectory is trained twice, also not by steps that a restart undoes",
    "staleness": "no trained token is older than `rollout.max_staleness`",
    "versions": "an engine serves only weights that were read back; tokens have the version that drew them",
    "tokens": "trained tokens, log-probs and masks are those that an engine drew; no sampled token is lost",
    "routing": "routing rows are those of their tokens, or absent",
    "progress": "the run reaches its end, or ends with one sentence that names the cause",
    "blame": "a fault costs the component that has it, and no other one",
    "records": "what the run's files and counters say agrees with what was done",
    "devices": "one side holds the memory of shared devices, or both hold weights alone",
}
"""What the faults attack."""

FAULTS: Final[dict[FaultKind, FaultRow]] = {
    "die_in_call": FaultRow("call", ("tokens", "progress"), "the engine dies during a call"),
    "hang": FaultRow("call", ("progress", "blame"), "a call goes silent and ends in a timeout"),
    "wrong_rows": FaultRow("call", ("routing",), "a call returns one routing row too many"),
    "wrong_mask": FaultRow("call", ("tokens",), "a sampling mask excludes its token", 0.2),
    "nan": FaultRow("call", ("tokens",), "a log-prob is NaN"),
    "lose": FaultRow("call", ("tokens",), "a chunk is lost"),
    "repeat": FaultRow("call", ("tokens", "once"), "a chunk arrives twice"),
    "disconnect": FaultRow("call", ("tokens", "blame"), "the connection is lost, the engine is well"),
    "skewed_versions": FaultRow(
        "call", ("versions", "staleness"), "the events of a call say two weight versions, not where", 0.15
    ),
    "lying_version": FaultRow(
        "update",
        ("versions",),
        "an engine keeps its weights and reports the new version; `weights.verify` is `checksum` then",
        0.1,
    ),
    "refuse_flush": FaultRow(
        "update", ("routing", "versions"), "the engine refuses to flush its cache at first"
    ),
    "partial_update": FaultRow("update", ("versions",), "an update fails halfway"),
    "late_error": FaultRow("update", ("versions",), "an update is applied and reports an error"),
    "no_op_update": FaultRow(
        "update", ("versions", "staleness"), "an update reports success and is not applied"
    ),
    "hang_update": FaultRow("update", ("progress",), "an update is never answered"),
    "die_in_update": FaultRow("update", ("progress", "versions"), "the engine dies during an update"),
    "hold_all": FaultRow(
        "update", ("progress", "staleness"), "the next update of every engine takes up to 15 s longer", 0.1
    ),
    "refuse_first": FaultRow(
        "update",
        ("blame", "progress"),
        "an engine serves up to 15 s before the others after an update, and answers 400 to calls until then",
        0.15,
    ),
    "die": FaultRow("engine", ("progress", "blame"), "an engine is killed; its watcher notices"),
    "die_unseen": FaultRow("engine", ("progress", "blame"), "an engine is killed; no watcher notices"),
    "freeze": FaultRow("engine", ("progress", "blame"), "an engine answers nothing for 0.1 s to 1000 s"),
    "slow": FaultRow("engine", ("progress", "blame"), "an engine decodes 20 times as slowly"),
    "fail_restarts": FaultRow("engine", ("progress", "blame"), "the next restarts of an engine fail"),
    "refuse_calls": FaultRow(
        "refusal", ("progress", "blame"), "an engine answers 401, 404 or 500 to calls until restarted", 0.1
    ),
    "refuse_requests": FaultRow(
        "refusal",
        ("blame", "progress"),
        "an engine answers 400 to calls, as to wrong requests, for up to 10 s",
        0.1,
    ),
    "too_busy": FaultRow(
        "refusal", ("blame", "progress"), "an engine takes at most 3 calls and answers 429 to others", 0.1
    ),
    "no_descriptors": FaultRow("refusal", ("blame",), "the driver has no descriptors for connections", 0.1),
    "step_fails": FaultRow("trainer", ("once", "progress"), "a trainer step fails"),
    "step_is_nan": FaultRow("trainer", ("once", "progress"), "the loss is NaN"),
    "step_is_slow": FaultRow("trainer", ("staleness", "progress"), "a trainer step takes ten times as long"),
    "checkpoint_fails": FaultRow("trainer", ("once",), "a checkpoint cannot be written"),
    "publish_fails": FaultRow("trainer", ("versions", "once"), "weights cannot be published"),
    "disk_full": FaultRow("disk", ("conservation", "records", "progress"), "the disk is full for a while"),
    "unwritable_disk": FaultRow(
        "disk", ("conservation", "records", "progress"), "writes answer EROFS or EIO for up to 10 s", 0.15
    ),
    "second_driver": FaultRow(
        "disk", ("once", "conservation"), "another driver starts in the run's folder, whose lock is gone", 0.1
    ),
    "no_files": FaultRow(
        "disk",
        ("conservation", "records", "blame"),
        "the driver has no descriptors for files for up to 10 s",
        0.1,
    ),
    "corrupt_frame": FaultRow("disk", ("conservation", "tokens"), "a bit of a queued frame flips"),
    "unreadable_file": FaultRow(
        "disk",
        ("conservation", "progress"),
        "a frame or a journal on disk cannot be opened any more: EIO, ESTALE or EACCES",
        0.15,
    ),
    "clock_jump": FaultRow("clock", ("progress", "blame"), "the clock jumps by 10 ms to 100 s"),
    "refuse_memory": FaultRow(
        "memory", ("devices", "progress"), "an engine refuses to change its device memory"
    ),
    "hang_memory": FaultRow("memory", ("devices", "progress"), "a change of device memory is never answered"),
    "offload_fails": FaultRow(
        "offload", ("devices", "progress"), "the trainer cannot move its memory to the host"
    ),
    "reload_fails": FaultRow("offload", ("devices", "progress"), "the trainer cannot take its memory back"),
    "stuck_payload": FaultRow(
        "call",
        ("routing", "blame"),
        "routing payloads stop in the middle for 0.1 s to 100 s; other requests are answered",
        0.15,
    ),
    "slow_payload": FaultRow(
        "call", ("routing", "blame"), "a routing payload takes up to 40 s, and arrives steadily", 0.15
    ),
    "retract": FaultRow(
        "call", ("routing", "staleness"), "an engine takes a call's memory and prefills the call again", 0.3
    ),
    "kill_worker": FaultRow("worker", ("conservation", "tokens"), "a rollout worker is killed"),
    "mute_worker": FaultRow("worker", ("progress", "versions"), "a rollout worker falls silent"),
    "deafen_worker": FaultRow(
        "worker",
        ("versions", "progress"),
        "a rollout worker handles no more messages, and its heartbeats go on",
        0.2,
    ),
    "cut_off_worker": FaultRow(
        "worker", ("conservation", "versions", "once"), "a rollout worker is cut off from the driver"
    ),
    "delay_worker": FaultRow(
        "worker",
        ("versions", "staleness", "blame"),
        "a rollout worker's messages take up to 15 s longer for once; every other time it reads no streams",
        0.4,
    ),
    "isolate_worker": FaultRow(
        "worker",
        ("blame", "progress"),
        "a rollout worker reaches no engine for up to 30 s, while the driver does",
        0.3,
    ),
    "kill_after_frame": FaultRow(
        "worker", ("conservation", "once"), "a rollout worker is killed between a frame and its report", 0.4
    ),
    "worker_disk_full": FaultRow(
        "worker",
        ("conservation", "progress"),
        "rollout workers find no space for frames for up to 100 s",
        0.3,
    ),
    "node_disk_full": FaultRow(
        "worker",
        ("conservation", "blame"),
        "rollout workers of one node find no space for frames for up to 100 s",
        0.3,
    ),
    "lose_message": FaultRow(
        "worker",
        ("conservation", "progress"),
        "a message between the driver and a rollout worker is lost",
        0.3,
    ),
    "repeat_message": FaultRow(
        "worker",
        ("once", "conservation"),
        "messages between the driver and a rollout worker arrive twice",
        0.3,
    ),
    "reorder_messages": FaultRow(
        "worker",
        ("once", "versions"),
        "a message between the driver and a rollout worker overtakes another",
        0.3,
    ),
    "late_request": FaultRow(
        "worker",
        ("versions", "devices", "blame"),
        "a rollout worker's request reaches its engine after its caller has left",
        0.4,
    ),
    "node_lost": FaultRow(
        "worker",
        ("conservation", "progress"),
        "a node is lost with its rollout workers and their frames",
        0.4,
    ),
    "node_wiped": FaultRow(
        "worker",
        ("conservation",),
        "a node loses its rollout workers and its disk, and is back at once with an empty one",
        0.3,
    ),
    "node_absent": FaultRow(
        "worker",
        ("conservation", "progress"),
        "what reads the frames on a node does not answer for up to 100 s",
        0.3,
    ),
    "bad_environment_worker": FaultRow(
        "worker",
        ("blame", "progress"),
        "every agent loop raises at once in one rollout worker, also after restarts, for up to 100 s",
        0.3,
    ),
    "wrong_message": FaultRow(
        "worker",
        ("conservation", "once", "blame"),
        "a rollout worker sends a well-formed message about what it was not given",
        0.3,
    ),
    "kill_model": FaultRow("model", ("progress", "blame"), "an engine of a teacher or judge is killed", 0.6),
    "lose_model": FaultRow(
        "model",
        ("progress", "blame"),
        "an engine of a teacher or judge is killed, and no watcher notices",
        0.4,
    ),
    "fail_model": FaultRow(
        "model",
        ("progress", "blame"),
        "an engine of a teacher or judge is killed, and its next restarts fail",
        0.3,
    ),
    "busy_model": FaultRow(
        "model", ("progress", "blame"), "an engine of a teacher or judge refuses calls", 0.3
    ),
    "raise": FaultRow("user", ("blame", "progress"), "the agent loop raises"),
    "hang_loop": FaultRow("user", ("blame", "progress"), "the agent loop hangs"),
    "silent": FaultRow("user", ("conservation",), "the agent loop returns without a turn"),
    "too_long": FaultRow("user", ("progress",), "a tool's result overfills the context"),
    "flaky_reward": FaultRow("user", ("blame",), "the reward raises"),
    "slow_reward": FaultRow("user", ("progress", "blame"), "the reward takes too long"),
    "slow_tool": FaultRow("user", ("progress", "blame"), "a tool exceeds its limit"),
    "split_stop": FaultRow(
        "user", ("tokens",), "an interruption splits a stop string of the agent loop", 0.15
    ),
    "bad_message": FaultRow(
        "user", ("blame", "progress"), "the agent loop adds what no chat template renders", 0.1
    ),
    "bad_return": FaultRow(
        "user", ("blame", "progress"), "the agent loop returns a reward, a number or a mapping", 0.1
    ),
    "bad_reward": FaultRow("user", ("blame", "conservation"), "the reward returns no finite number", 0.1),
    "exit": FaultRow("user", ("blame", "progress"), "the agent loop calls sys.exit", 0.1),
    "leak_cancel": FaultRow(
        "user", ("progress", "conservation"), "the agent loop raises CancelledError by itself", 0.1
    ),
    "swallow_cancel": FaultRow(
        "user", ("progress", "conservation"), "the agent loop continues when it is cancelled", 0.2
    ),
    "kill": FaultRow("driver", ("conservation", "once"), "the driver is killed between two callbacks"),
    "kill_on_disk": FaultRow(
        "driver", ("conservation", "once", "records"), "the driver is killed inside a disk operation"
    ),
    "power_cut": FaultRow(
        "driver",
        ("conservation", "once", "records"),
        "the driver's machine loses power, and writes that were not synced",
        0.3,
    ),
    "cancel": FaultRow("driver", ("conservation", "progress"), "the driver is cancelled (2nd Ctrl-C)"),
    "stop": FaultRow("driver", ("conservation", "progress"), "the driver is stopped by a signal and resumed"),
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
    header = f"{'fault':<23}{'family':<9}{'happened':>9}" + (f"{'in seeds':>10}" if seeds is not None else "")
    lines = [f"{header}  {'attacks':<31}what happens"]
    for kind, row in FAULTS.items():
        line = f"{kind:<23}{row.family:<9}{times.get(kind, 0):>9}"
        line += f"{seeds.get(kind, 0):>10}" if seeds is not None else ""
        lines.append(f"{line}  {', '.join(row.attacks):<31}{row.description}")
    return lines


def promise_table() -> str:
    """Return the table of promises in `docs/design/simulation.md`: what attacks each."""
    lines = ["| promise | attacked by |", "|---|---|"]
    for promise, meaning in PROMISES.items():
        attackers = (f"`{kind}`" for kind, row in FAULTS.items() if promise in row.attacks)
        lines.append(f"| {promise}: {meaning} | {', '.join(attackers)} |")
    return "\n".join(lines)
