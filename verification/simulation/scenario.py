"""What a seed stands for: a config, tasks, and what goes wrong when. Pure; nothing is drawn while it runs.

Each seed uses some of the kinds of fault only, so that some runs are ruled by one of them, and one in eight
is a run in peace.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal, TypeVar
from unittest.mock import patch

import msgspec
from msgspec.structs import replace

from async_rl.config import (
    Config,
    CurriculumConfig,
    EvaluationConfig,
    FrozenModelConfig,
    FunctionReward,
    HttpReward,
    JudgeReward,
    LoraConfig,
    SourceConfig,
    TeacherConfig,
    parse_config,
)
from async_rl.engine_protocol import EngineFacts
from async_rl.types import Task
from verification.simulation.faults import (
    FAULTS,
    SHARED_STREAM,
    FaultKind,
    Setting,
    kinds_of,
    own_streams,
)

T = TypeVar("T")

Ending = Literal["kill", "kill_on_disk", "cancel", "stop", "power_cut"]
"""What ends an incarnation of the driver: killed between two callbacks or between two operations on its disk,
cancelled (the second Ctrl-C), told to stop (the first), or cut off from its power."""

_DRAWN_TOGETHER: Final[tuple[Ending, ...]] = ("kill", "kill_on_disk", "cancel", "stop")
"""The first endings, which share a stream. No other joins them."""

FACTS: Final = EngineFacts(
    num_layers=3, moe_layers=(1, 2), num_experts=61, top_k=2, vocab_size=400, context_length=4096
)
"""Experts of the simulated model. The number is prime: a routing row encodes its weight version modulo 61."""

_EVALUATED: Final = 0.15
"""Share of the seeds that evaluate beside training."""

_MASKED: Final = 0.3
"""Share of the seeds whose sampling is truncated."""

_ADAPTERS: Final = 0.25
"""Share of the seeds on shared devices whose engines load adapters."""

_HANDLES: Final = 0.6
"""Share of the seeds on shared devices whose engines take weights from the trainer's devices, if they do not
load adapters."""

_GROUP_REWARDS: Final = 0.25
"""Share of the seeds in which one call rewards a group."""

NODES: Final = "nodes"
"""The folder with the disks of nodes, in that of a simulation."""

_LAST_STEP: Final = 5_000
"""Callbacks of the loop within which faults may occur."""


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong."""

    step: int
    """Callback of the loop, counted over all incarnations of the driver."""
    kind: FaultKind
    engine: int
    """Which, modulo their number."""
    amount: float
    """In (0, 1): how long, how late, which byte."""

    def __post_init__(self) -> None:
        """Refuse a fault without a row."""
        if self.kind not in FAULTS:
            raise ValueError(f"{self.kind} is no fault; add a row to verification.simulation.faults.FAULTS")


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """How an incarnation of the driver ends."""

    kind: Ending
    after: int
    """Steps of the loop since its beginning; operations of the disk for `kill_on_disk`."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, virtual seconds."""

    train_s: float
    update_s: float
    restart_s: float
    latency_s: float
    """Mean delay of what an engine says, drawn for each chunk; 0 for none."""
    thread_s: float
    """Mean of both parts of a thread's work; 0 for none."""
    chunk_tokens: int = 1
    """Tokens that an engine sends at once."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run."""

    seed: int
    config: Config
    tasks: tuple[Task, ...]
    speeds: Speeds
    injections: tuple[Injection, ...]
    deaths: tuple[Death, ...]
    """Deaths of the first incarnations; later ones run to the end."""
    validation: tuple[Task, ...] = ()
    """Tasks of the evaluations; empty without them."""
    constants: dict[str, float | None] = {}
    """Values of constants of the product during the run, by their dotted paths: so that a short run reaches
    what takes an hour in a real one."""

    @contextmanager
    def constants_set(self) -> Iterator[None]:
        """Set the constants while the block runs."""
        with ExitStack() as stack:
            for path, value in self.constants.items():
                stack.enter_context(patch(path, value))
            yield


def draw(seed: int) -> Scenario:
    """The scenario of a seed, the same in every process."""
    rng = random.Random(f"scenario {seed}")
    speeds = Speeds(
        train_s=rng.choice((0.0, 0.05, 0.3, 2.0)),
        update_s=rng.choice((0.0, 0.02, 0.3)),
        restart_s=rng.choice((0.0, 0.5, 5.0)),
        latency_s=rng.choice((0.0, 0.0, 0.004, 0.05)),
        thread_s=rng.choice((0.0, 0.002, 0.05)),
    )
    config, constants = _config(rng, seed)
    scenario = Scenario(
        seed=seed,
        config=config,
        constants=constants,
        tasks=tuple(draw_task(rng, index) for index in range(rng.randint(3, 24))),
        speeds=speeds,
        injections=_injections(rng),
        deaths=_deaths(rng),
    )
    rollout = scenario.config.rollout
    if random.Random(f"sampling masks {seed}").random() < _MASKED:
        rollout = replace(rollout, top_p=0.9, top_k=4)
    if (rng := random.Random(f"group rewards {seed}")).random() < _GROUP_REWARDS:
        reward = "verification.simulation.users:" + rng.choice(("group_reward", "group_reward_in_thread"))
        rollout = replace(rollout, reward=reward)
    scenario = replace(scenario, config=replace(scenario.config, rollout=rollout))
    scenario = _with_own_streams(scenario, "any")
    return evaluating(scenario) if random.Random(f"evaluation {seed}").random() < _EVALUATED else scenario


def _with_own_streams(scenario: Scenario, setting: Setting) -> Scenario:
    """Add the faults that have a stream of their own, see `own_streams`."""
    injections, tasks, deaths = list(scenario.injections), list(scenario.tasks), list(scenario.deaths)
    config = scenario.config
    for kind, rng in own_streams(scenario.seed, setting):
        if FAULTS[kind].family == "user":
            for index in rng.sample(range(len(tasks)), max(1, len(tasks) // 8)):
                tasks[index] = replace(tasks[index], metadata={**tasks[index].metadata, "trouble": kind})
        elif kind == "power_cut":
            death = Death(kind="power_cut", after=int(_LAST_STEP ** rng.uniform(0.2, 1.0)))
            deaths.insert(rng.randint(0, len(deaths)), death)
        else:
            injections += [_injection(rng, (kind,)) for _ in range(rng.choice((1, 2, 4)))]
        if kind == "lying_version":  # nothing else would notice
            config = replace(config, weights=replace(config.weights, verify="checksum"))
    injections.sort(key=lambda injection: injection.step)
    return replace(
        scenario, config=config, injections=tuple(injections), tasks=tuple(tasks), deaths=tuple(deaths)
    )


def peaceful(scenario: Scenario) -> Scenario:
    """The same with nothing going wrong: nothing happens at a number of callbacks."""
    return replace(scenario, injections=(), deaths=())


def evaluating(scenario: Scenario) -> Scenario:
    """The same with evaluations beside training, on borrowed or reserved engines."""
    rng = random.Random(f"evaluating {scenario.seed}")
    config = scenario.config
    reserves = config.engine.num_engines > 1 and not config.placement.shared
    evaluation = msgspec.convert(
        {
            "every": rng.choice((1, 1, 2)),
            "at_start": rng.random() < 0.5,
            "engines": 1 if reserves and rng.random() < 0.2 else "shared",
            "samples": rng.choice((1, 2, 4)),
            "temperature": rng.choice((None, 0.0)),
            "agent_loop": "verification.simulation.users:AnswerLoop",
            "max_concurrent": rng.choice((1, 4, 64)),
            "timeout_s": rng.choice((3.0, 30.0)),
        },
        EvaluationConfig,
    )
    tasks = tuple(
        replace(task, task_id=f"validation-{index}", metadata={**task.metadata, "trouble": None})
        for index, task in enumerate(draw_task(rng, index) for index in range(rng.randint(1, 4)))
    )
    data = replace(config.data, validation=[SourceConfig(path="validation")])
    return replace(scenario, config=replace(config, evaluation=evaluation, data=data), validation=tasks)


def branching(scenario: Scenario) -> Scenario:
    """The same with agent loops that branch; what goes wrong falls elsewhere then."""
    rng = random.Random(f"branches {scenario.seed}")
    rollout = replace(
        scenario.config.rollout,
        agent_loop="verification.simulation.users:TreeLoop",
        max_branches=rng.choice((1, 3, 6)),
    )
    tasks = []
    for task in scenario.tasks:
        turns = [
            {**turn, "branches": rng.choice((0, 0, 1, 2)), "side_by_side": rng.random() < 0.5}
            for turn in task.metadata["turns"]
        ]
        tasks.append(replace(task, metadata={**task.metadata, "turns": turns}))
    return replace(scenario, config=replace(scenario.config, rollout=rollout), tasks=tuple(tasks))


def by_difficulty(scenario: Scenario) -> Scenario:
    """The same with tasks that are drawn by their success rates, and let in one after the other."""
    rng = random.Random(f"curriculum {scenario.seed}")
    curriculum = CurriculumConfig(
        memory=rng.choice((0.0, 0.5, 1.0)),
        warm_up=rng.choice((0, 0, 10)),
        gate=rng.choice((None, "verification.simulation.users:opens_at")),
    )
    data = replace(scenario.config.data, curriculum=curriculum)
    evaluation = replace(scenario.config.evaluation, pass_reward=0.5)
    return replace(scenario, config=replace(scenario.config, data=data, evaluation=evaluation))


def sharing(scenario: Scenario) -> Scenario:
    """The same on devices that engines and trainer share; some of what goes wrong does so as they change."""
    rng = random.Random(f"shared {scenario.seed}")
    sent = random.Random(f"handles {scenario.seed}").random() < _HANDLES
    weights = replace(
        scenario.config.weights,
        transport="tensor" if sent else "disk",
        interrupt="abort",
        rolling=False,
        overlap=False,
        every=1,
    )
    config = replace(
        scenario.config,
        weights=weights,
        placement=replace(scenario.config.placement, shared=True),
        evaluation=replace(scenario.config.evaluation, engines="shared"),
    )
    if random.Random(f"adapters {scenario.seed}").random() < _ADAPTERS:
        config = with_adapters(config)
    kinds = kinds_of("memory", "offload")
    injections = tuple(
        replace(injection, kind=rng.choice(kinds)) if rng.random() < 0.4 else injection
        for injection in scenario.injections
    )
    return _with_own_streams(replace(scenario, config=config, injections=injections), "shared")


def with_adapters(config: Config) -> Config:
    """The same with engines that keep the model's weights and load an adapter for each version."""
    weights = replace(config.weights, verify="version", transport="disk")
    return replace(config, weights=weights, trainer=replace(config.trainer, lora=LoraConfig()))


def with_models(scenario: Scenario) -> Scenario:
    """The same with a teacher that scores every trajectory, and for some a judge; their engines die."""
    rng, config = random.Random(f"models {scenario.seed}"), scenario.config
    models = {"teacher": FrozenModelConfig(path=config.model.path, num_engines=rng.choice((1, 2)))}
    reward, rewards = config.rollout.reward, dict[str, FunctionReward | HttpReward | JudgeReward]()
    if rng.random() < 0.5:
        models["judge"] = FrozenModelConfig(path=config.model.path, num_engines=rng.choice((1, 2)))
        reward = "graded"
        rewards[reward] = JudgeReward(judge="judge", template="7 {response}", score=r"\d+", max_new_tokens=8)
    loss = replace(config.trainer.loss, teacher=TeacherConfig(model="teacher"))
    config = replace(
        config,
        models=models,
        trainer=replace(config.trainer, loss=loss),
        rollout=replace(config.rollout, top_p=1.0, top_k=-1, reward=reward, rewards=rewards),
    )
    return _with_own_streams(replace(scenario, config=config), "models")


def with_workers(scenario: Scenario) -> Scenario:
    """The same with rollout workers, which are killed, fall silent and are cut off now and then."""
    rng = random.Random(f"workers {scenario.seed}")
    rollout = replace(
        scenario.config.rollout,
        num_workers=rng.choice((1, 2, 3)),
        worker_stall_s=rng.choice((3.0, 10.0)),
    )
    faults = [_worker_fault(rng, "kill_worker", "mute_worker") for _ in range(rng.choice((0, 1, 3, 9)))]
    rng = random.Random(f"workers cut off {scenario.seed}")
    faults += [_worker_fault(rng, "cut_off_worker") for _ in range(rng.choice((0, 0, 1, 2)))]
    injections = sorted((*scenario.injections, *faults), key=lambda injection: injection.step)
    rng, queue = random.Random(f"nodes {scenario.seed}"), scenario.config.queue
    constants = scenario.constants
    if rng.random() < 0.5:  # frames stay on the nodes of their workers
        queue = replace(queue, spool_dir=NODES)
        constants = constants | {"async_rl.run.recovery.NODE_LOST_S": rng.choice((5.0, 30.0))}
    if random.Random(f"journals on nodes {scenario.seed}").random() < 0.3:
        queue = replace(queue, journal_dir="journals")
    config = replace(scenario.config, rollout=rollout, queue=queue)
    scenario = replace(scenario, config=config, constants=constants, injections=tuple(injections))
    return _with_own_streams(scenario, "workers")


def _config(rng: random.Random, seed: int) -> tuple[Config, dict[str, float | None]]:
    """Draw the settings of a run, and constants of the product by their dotted paths."""
    group_size = rng.choice((1, 2, 2, 3, 4))
    interrupt = rng.choice(("abort", "abort", "retract", "in_place"))
    context = rng.randint(72, 200)
    tree: dict[str, Any] = {
        "run": {
            "name": "run",
            "seed": seed % 1000,
            "max_steps": rng.randint(2, 7),
            "drain_s": rng.choice((0.0, 0.5, 5.0)),
            "keep_trajectories": 0,  # real time by the clock on the wall, for people only
        },
        "model": {"path": "model"},
        "data": {"path": "tasks", "shuffle": rng.random() < 0.7, "epochs": rng.choice((None, None, None, 2))},
        "engine": {
            "kind": "simulated",
            "num_engines": rng.choice((1, 2, 2, 3, 4)),
            "max_running_requests": rng.choice((1, 2, 4, 16)),
            "decode_step_s": rng.choice((0.002, 0.02, 0.1)),
            "prefill_tokens_per_s": rng.choice((300.0, 3000.0, 100_000.0)),
            "mean_new_tokens": rng.choice((3.0, 6.0, 12.0)),
            "stall_s": rng.choice((3.0, 10.0)),
            "async_rl.engines.health.PROBE_S": 2.0,
            "async_rl.engines.health.PROBE_TIMEOUT_S": 1.0,
            "async_rl.engines.health.PROBE_MISSES": rng.randint(1, 3),
            "async_rl.engines.lease_dispatcher.MAX_PREFILL_TOKENS": rng.choice((None, 100, 1000)),
            "max_restarts": rng.choice((2, 1000)),
            "async_rl.engines.repair.RESTART_WINDOW_S": rng.choice((20.0, 3600.0)),
            "async_rl.engines.repair.RESTART_DELAY_S": rng.choice((0.0, 1.0)),
            "async_rl.engines.repair.RESTART_DELAY_MAX_S": rng.choice((10.0, 10.0, 5.0)),
            "max_outage_s": rng.choice((15.0, 300.0)),
        },
        "rollout": {
            "agent_loop": "verification.simulation.users:TurnsLoop",
            "reward": "verification.simulation.users:" + rng.choice(("reward", "reward_in_thread")),
            "group_size": group_size,
            "max_concurrent_trajectories": rng.choice((1, 3, 8, 24)),
            "max_staleness": rng.choice((0, 1, 1, 2, 4)),
            "staleness_policy": rng.choice(("wait", "drop", "mask_tokens")),
            "max_context_tokens": context,
            "max_new_tokens": rng.randint(4, context // 2),
            "temperature": 1.0,
            "trajectory_timeout_s": rng.choice((2.0, 15.0, 40.0)),
            "tool_timeout_s": 1.0,
            "reward_timeout_s": 2.0,
            "max_attempts": rng.randint(1, 3),
            "failed_siblings": rng.choice(("train_rest", "drop", "retry")),
            "min_group_size": rng.randint(1, 2),
            "async_rl.run.recovery.MAX_TASK_RETRIES": rng.randint(0, 2),
            "straggler_wait_s": rng.choice((None, None, 0.5, 5.0)),
            "dynamic_filtering": group_size > 1 and rng.random() < 0.2,
            "max_failed_share": rng.choice((1.0, 1.0, 1.0, 0.5)),
            "max_filtered_groups": 24,  # failures of long tasks reach it before the run seems stuck
        },
        "routing": {
            "replay": rng.choice(("r3", "r3", "r3", "off")),
            "merge": "splice" if interrupt == "in_place" else rng.choice(("replace", "splice")),
            "flip_sample": rng.choice((0.0, 0.5)),
        },
        "queue": {
            "max_bytes": rng.choice((1 << 20, 2 << 20, 1 << 30)),
            "journal_s": rng.choice((None, 0.05, 0.5)),
        },
        "weights": {
            "transport": _transport(rng.choice(("disk", "tensor", "distributed")), seed),
            "async_rl.weights.delta_delivery.FULL_EVERY": 3,
            "interrupt": interrupt,
            "rolling": rng.random() < 0.3,
            "bucket_bytes": 1 << 20,
            "async_rl.weights.publisher.KEEP_VERSIONS": rng.randint(1, 2),
            "timeout_s": rng.choice((4.0, 20.0)),
            # Drawn apart: older seeds stay as they are.
            "overlap": random.Random(f"overlap {seed}").random() < 0.5,
        },
        "trainer": {
            "groups_per_batch": rng.choice((1, 2, 2, 3, 4)),
            "checkpoint_every": rng.choice((0, 1, 2, 3)),
            "loss": {"advantages": "grpo" if group_size > 1 else "reinforce++"},
            "keep_checkpoints": rng.randint(1, 2),
            "max_restarts": rng.choice((0, 1, 1000)),
        },
        "doctor": {"action": rng.choice(("report", "repair")), "stall_s": rng.choice((10.0, 45.0))},
    }
    caches = random.Random(f"caches {seed}")  # likewise
    tree["engine"]["max_total_tokens"] = caches.choice((None, context, 2 * context, 6 * context))
    tree["engine"]["max_calls"] = caches.choice(("adaptive", "adaptive", "adaptive", 2, None))
    every = random.Random(f"every {seed}").choice((1, 1, 2, 3))  # likewise
    tree["weights"]["every"] = min(every, tree["rollout"]["max_staleness"] + 1)
    constants = {
        path: section.pop(path)
        for section in tree.values()
        for path in list(section)
        if path.startswith("async_rl.")
    }
    return parse_config(tree), constants


def _transport(drawn: str, seed: int) -> str:
    """Deltas for some; drawn apart: the other seeds stay as they are."""
    return "delta" if random.Random(f"delta {seed}").random() < 0.25 else drawn


def draw_task(rng: random.Random, index: int) -> Task:
    """A prompt as token ids in words, and a script of what the agent loop and its tools do."""
    prompt = " ".join(str(rng.randrange(5, FACTS.vocab_size)) for _ in range(rng.randint(3, 40)))
    turns = [
        {
            "max_new_tokens": rng.choice((None, None, 3, 10)),
            "tool_s": rng.choice((0.0, 0.01, 0.2, 1.5)),
            "in_thread": rng.random() < 0.2,
            "result": " ".join(str(rng.randrange(5, FACTS.vocab_size)) for _ in range(rng.randint(1, 12))),
        }
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    trouble = rng.choice(("raise", "hang_loop", "silent", "too_long", "flaky_reward", "slow_reward"))
    return Task(
        task_id=f"task-{index}",
        messages=[{"role": "user", "content": prompt}],
        answer=index,
        metadata={"turns": turns, "trouble": trouble if rng.random() < 0.15 else None},
    )


def _injections(rng: random.Random) -> tuple[Injection, ...]:
    if rng.random() < 0.125:
        return ()
    kinds = _some(rng, SHARED_STREAM)
    drawn = [_injection(rng, kinds) for _ in range(rng.choice((1, 2, 4, 8, 16)))]
    return tuple(sorted(drawn, key=lambda injection: injection.step))


def _injection(rng: random.Random, kinds: Sequence[FaultKind]) -> Injection:
    return Injection(
        step=int(_LAST_STEP ** rng.uniform(0.4, 1.0)),
        kind=rng.choice(kinds),
        engine=rng.randrange(12),
        amount=rng.uniform(0.001, 0.999),
    )


def _worker_fault(rng: random.Random, *kinds: FaultKind) -> Injection:
    step = int(_LAST_STEP ** rng.uniform(0.4, 1.0))
    kind = rng.choice(kinds) if len(kinds) > 1 else kinds[0]  # as seeds have always drawn them
    return Injection(step=step, kind=kind, engine=rng.randrange(12), amount=rng.random())


def _deaths(rng: random.Random) -> tuple[Death, ...]:
    deaths: list[Death] = []
    while len(deaths) < 3 and rng.random() < 0.45:
        kind = rng.choice(_DRAWN_TOGETHER)
        last = 400 if kind == "kill_on_disk" else _LAST_STEP
        deaths.append(Death(kind=kind, after=int(last ** rng.uniform(0.2, 1.0))))
    return tuple(deaths)


def _some(rng: random.Random, kinds: Sequence[T]) -> list[T]:
    """A part of them, at least one; often few, often most."""
    share = rng.choice((0.1, 0.4, 0.8))
    chosen = [kind for kind in kinds if rng.random() < share]
    return chosen or [rng.choice(kinds)]
