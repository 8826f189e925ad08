"""Compares scheduling policies in virtual time: async_rl's production code and models of its peers.

    python benchmarks/scheduling.py [--quick] [--plot FILE] [--json FILE]

The world: 8 engines of 128 slots, a decode step of 12 ms + 0.06 ms for each running call, prefill at 30k
tokens/s, unshared prompts of 512 tokens, groups of 8, answers lognormal (mean 8192, sigma 0.8, cut
at 32768). Training a version takes 0.9 of its fluid generation time, updating engines 5 s. `rel` is trained
trajectories a second over the fluid bound: engines always full, updates free, the trainer never waited for.

async_rl runs `async_rl.planning.planned_job.simulate`: the orchestrator, manager, queue, pool and weight
sync that run. A peer is modelled by what its scheduler decides, on the same engines: what may be in flight,
what an update does to it, what a batch is made of, and what is thrown away. Each model says which project it
follows.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import Config, parse_config
from async_rl.engine_protocol import Chunk, DiskUpdate, GenerateRequest, InterruptMode, SamplingParams
from async_rl.planning.coarse_engine import CoarseEngine, EngineSpeed, mark
from async_rl.planning.planned_job import PlannedRun, simulate
from async_rl.planning.virtual_time import run_virtual
from async_rl.planning.workload import EndlessTasks, Workload, fluid_rate
from async_rl.runtime.supervision import Nursery
from benchmarks.support.tables import Row, argument_parser, report

ENGINES, SLOTS, GROUP, SCALE = 8, 128, 8, 64
WORLD = Workload(shares_prompts=False)
TRAIN_SHARE = 0.9


class Answer(msgspec.Struct):
    """A finished trajectory."""

    tokens: int
    oldest: int


Group = list[Answer]
"""Siblings, all finished."""


class Length(msgspec.Struct):
    """Length of a simulation."""

    versions: int
    warmup: int


# -- peers ------------------------------------------------------------------------------------------------


class Peer(ABC):
    """A scheduler on coarse engines. Subclasses decide; this trains, updates, and keeps count."""

    interrupt: InterruptMode = "abort"
    resume_after_s = 0.0
    """An aborted call is sent again after so long."""
    engine_factor = 1
    """Engines for each of the world's: colocated, the trainer's devices generate too."""
    train_factor = 1.0

    def __init__(self, groups_per_batch: int, seed: int, length: Length) -> None:
        self.batch = groups_per_batch
        self.length = length
        self.tasks = EndlessTasks(WORLD, SCALE, seed, GROUP)
        speed = EngineSpeed(
            slots=SLOTS,
            decode_base_s=WORLD.decode_base_s * SCALE,
            decode_per_call_s=WORLD.decode_per_call_s * SCALE,
            prefill_tokens_per_s=WORLD.prefill_tokens_per_s / SCALE,
            update_s=WORLD.sync_s,
            shares_prompts=False,
        )
        self.engines = [CoarseEngine(f"{i}", speed) for i in range(ENGINES * self.engine_factor)]
        self.calls: Counter[str] = Counter()
        self.version = 0
        self.numbers = count()
        self.serving = asyncio.Event()
        self.serving.set()
        self.changed = asyncio.Event()
        self.ready: deque[Group] = deque()
        self.in_flight = 0
        """Groups."""
        self.trained: list[tuple[int, Group]] = []
        self.train_s = 0.0
        self.num_dropped = 0
        """Trajectories."""
        self.marks: list[tuple[float, ...]] = []
        """After each step: the time, seconds of training, what was dropped, tokens prefilled and decoded."""

    async def answer(self, number: int, sibling: int) -> Answer:
        """One trajectory, over all its calls."""
        tokens, prompt = self.tasks.answers(number)[sibling], WORLD.prompt_tokens // SCALE
        sampled, oldest = 0, 1 << 30
        while sampled < tokens:
            await self.serving.wait()
            engine = min(self.engines, key=lambda e: self.calls[e.engine_id])
            self.calls[engine.engine_id] += 1
            who = {"trajectory": number * GROUP + sibling + 1, "group": number + 1}
            request = GenerateRequest(
                request_id="",
                input_ids=mark(prompt + sampled, stop_at=prompt + tokens, **who),
                max_new_tokens=tokens,
                sampling=SamplingParams(),
            )
            try:
                async for event in engine.generate(request):
                    if isinstance(event, Chunk):
                        sampled += len(event.token_ids)
                    else:
                        oldest = min([oldest, *(span.weight_version for span in event.version_spans)])
            finally:
                self.calls[engine.engine_id] -= 1
            if sampled < tokens:
                await asyncio.sleep(self.resume_after_s)
        return Answer(tokens, oldest)

    async def group(self, number: int) -> Group:
        """All siblings at once."""
        async with Nursery() as siblings:
            asked = [siblings.start_task(f"{i}", self.answer(number, i)) for i in range(GROUP)]
        return [task.result() for task in asked]

    async def finish(self, number: int) -> None:
        """A group from its dispatch to the queue."""
        group = await self.group(number)
        self.ready.append(group)
        self.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Something has changed."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def train(self, groups: Sequence[Group]) -> None:
        """One step."""
        tokens = sum(a.tokens for group in groups for a in group) * SCALE
        fluid = fluid_rate(ENGINES, SLOTS, WORLD) * WORLD.expected_tokens
        seconds = TRAIN_SHARE * self.train_factor * tokens / fluid
        await asyncio.sleep(seconds)
        self.trained += [(self.version, group) for group in groups]
        self.train_s += seconds

    async def update(self) -> None:
        """All engines at once."""
        self.serving.clear()
        version = DiskUpdate(weight_version=self.version + 1, path="")

        async def one(engine: CoarseEngine) -> None:
            await engine.interrupt(self.interrupt)
            await engine.update_weights(version, flush=self.interrupt != "in_place")
            await engine.resume_generation(self.interrupt)

        async with Nursery() as nursery:
            for engine in self.engines:
                nursery.start_task(engine.engine_id, one(engine))
        self.version += 1
        self.serving.set()
        usages = [engine.usage() for engine in self.engines]
        fed, decoded = (
            sum(getattr(u, f"{kind}_tokens") for u in usages) for kind in ("prefilled", "decoded")
        )
        time_s = asyncio.get_running_loop().time()
        self.marks.append((time_s, self.train_s, self.num_dropped, fed, decoded))
        self.wake()

    @abstractmethod
    async def run(self) -> None:
        """All versions."""

    def measure(self) -> Row:
        """After the warm-up."""
        first, steps = self.length.warmup - 1, self.length.versions
        marks = np.subtract(self.marks[first + steps], self.marks[first])
        seconds, train_s, dropped, fed, decoded = marks.tolist()
        kept = [(v, g) for v, g in self.trained if self.length.warmup <= v < self.length.warmup + steps]
        ages = np.array([v - a.oldest for v, group in kept for a in group])
        lengths = np.array([a.tokens for _, group in kept for a in group], np.int32)
        return {
            "rel": len(lengths) / seconds / fluid_rate(ENGINES, SLOTS, WORLD),
            "trainer_idle": 1 - train_s / seconds,
            "staleness_mean": float(ages.mean()),
            "staleness_p99": int(np.percentile(ages, 99)),
            "staleness_max": int(ages.max()),
            "dropped": dropped / (dropped + len(lengths)),
            "masked": 0.0,
            "prefilled": fed / decoded,
            "ks": self.tasks.ks_distance(lengths),
        }


class Synchronous(Peer):
    """Generate a batch, train it, update. Colocated: all devices do the one, then the other.

    Source: the usual trainer of verl (`RayPPOTrainer.fit`) and of slime with `--colocate`.
    """

    engine_factor = 2
    train_factor = 0.5

    trains_meanwhile = False

    async def run(self) -> None:
        """Implements `Peer.run`."""
        batch: list[Group] = []
        while self.version < self.length.warmup + self.length.versions:
            async with Nursery() as nursery:
                asked = [
                    nursery.start_task("group", self.group(next(self.numbers))) for _ in range(self.batch)
                ]
                if self.trains_meanwhile:
                    await self.train(batch)
            batch = [task.result() for task in asked]
            if not self.trains_meanwhile:
                await self.train(batch)
            await self.update()


class OneStepOff(Synchronous):
    """The next batch is generated while one is trained; then weights are exchanged.

    Source: verl's `one_step_off_policy`; DeepCoder; slime's `train_async.py`.
    """

    engine_factor = 1
    train_factor = 1.0
    trains_meanwhile = True


class Stream(Peer):
    """Groups are dispatched while others are trained; a batch is the B that finished first."""

    parts = 1
    """A batch is trained in so many, each as soon as it is there."""

    async def run(self) -> None:
        """Implements `Peer.run`."""
        async with Nursery() as nursery:
            nursery.start_task("dispatch", self.dispatch(nursery))
            while self.version < self.length.warmup + self.length.versions:
                for _ in range(self.parts):
                    self.discard()
                    while len(self.ready) < self.batch // self.parts:
                        await self.changed.wait()
                        if len(self.ready) >= self.batch // self.parts:
                            self.discard()
                    await self.train([self.ready.popleft() for _ in range(self.batch // self.parts)])
                self.taken()
                await self.update()
            nursery.cancel_tasks()

    async def dispatch(self, groups: Nursery) -> None:
        """Groups, as long as one more is admitted."""
        while True:
            while not self.admits():
                await self.changed.wait()
            self.in_flight += 1
            number = next(self.numbers)
            self.dispatched(number, groups.start_task("group", self.finish(number)))

    @abstractmethod
    def admits(self) -> bool:
        """Whether one more group may go."""

    def dispatched(self, number: int, task: asyncio.Task[None]) -> None:
        """One went."""

    def taken(self) -> None:
        """A batch was trained; the update comes next."""

    def discard(self) -> None:
        """Throw away what is too old."""


class VerlFullyAsync(Stream):
    """A quota for each window between two updates, and 24 groups in flight for each replica.

    Of a window's quota of 1.5 batches what is unfinished or queued at the update counts into the next one. An
    update aborts everything; the client sends it again, with what it has, a second later.
    Source: verl `experimental/fully_async_policy`: `staleness_threshold=0.5`, `partial_rollout`,
    `max_concurrent_samples`.
    """

    resume_after_s = 1.0
    parts = 4
    window = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        return self.window < 3 * self.batch // 2 and self.in_flight < 24 * ENGINES

    def dispatched(self, number: int, task: asyncio.Task[None]) -> None:
        """Implements `Stream.dispatched`."""
        self.window += 1

    def taken(self) -> None:
        """Implements `Stream.taken`."""
        self.window = self.in_flight + len(self.ready)


class AReaL(Stream):
    """Admission by staleness, of groups: in flight and accepted stay below (η + version + 1) batches.

    Nothing bounds what happens after: how long a group runs and waits. An update aborts everything and the
    client loops. Groups in flight are bounded too: here to as many as fill the slots, or four times that.
    Source: AReaL `StalenessManager.get_capacity`, `max_concurrent_rollouts`, `max_head_offpolicyness=4`.
    """

    eta = 4
    concurrency = 1
    accepted = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        outstanding = len(self.ready) + self.in_flight + self.accepted
        fresh = (self.eta + self.version + 1) * self.batch
        return self.in_flight < self.concurrency * ENGINES * SLOTS // GROUP and outstanding < fresh

    def taken(self) -> None:
        """Implements `Stream.taken`."""
        self.accepted += self.batch


class RollingKept(AReaL):
    """Admission by staleness, slots of single trajectories, engines keep their KV cache: no peer so."""

    interrupt = "in_place"

    def __init__(self, groups_per_batch: int, seed: int, length: Length) -> None:
        super().__init__(groups_per_batch, seed, length)
        self.slots = asyncio.Semaphore(ENGINES * SLOTS)
        self.unseated = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        outstanding = len(self.ready) + self.in_flight + self.accepted
        fresh = (self.eta + self.version + 1) * self.batch
        return not self.unseated and not self.slots.locked() and outstanding < fresh

    async def answer(self, number: int, sibling: int) -> Answer:
        """See `Peer.answer`: in a slot of its own."""
        seated = False
        try:
            async with self.slots:
                seated = True
                self.unseated -= 1
                self.wake()
                return await super().answer(number, sibling)
        finally:
            self.unseated -= not seated
            self.wake()

    def dispatched(self, number: int, task: asyncio.Task[None]) -> None:
        """Implements `Stream.dispatched`."""
        self.unseated += GROUP


class PrimeRL(RollingKept):
    """Slots kept full of single rollouts, engines paused with their KV cache; groups too old are cancelled.

    Source: prime-rl `orchestrator/`: rollouts are counted one by one, `max_off_policy_steps` is held for
    each, time in the queue included.
    """

    bound = 8

    def __init__(self, groups_per_batch: int, seed: int, length: Length) -> None:
        super().__init__(groups_per_batch, seed, length)
        self.running: dict[int, tuple[int, asyncio.Task[None]]] = {}

    def admits(self) -> bool:
        """See `Stream.admits`: no more than the slots."""
        return not self.unseated and not self.slots.locked()

    def dispatched(self, number: int, task: asyncio.Task[None]) -> None:
        """Implements `Stream.dispatched`."""
        super().dispatched(number, task)
        self.running[number] = self.version, task
        task.add_done_callback(lambda _: self.running.pop(number, None))

    def discard(self) -> None:
        """Implements `Stream.discard`."""
        late = [n for n, (version, _) in self.running.items() if self.version - version > self.bound]
        for number in late:
            _, task = self.running.pop(number)
            task.cancel()
            self.in_flight -= 1
        fresh = [g for g in self.ready if self.version - min(a.oldest for a in g) <= self.bound]
        self.num_dropped += GROUP * (len(late) + len(self.ready) - len(fresh))
        self.ready = deque(fresh)
        if late:
            self.wake()


PEERS: tuple[tuple[str, type[Peer], dict[str, int]], ...] = (
    ("synchronous, colocated", Synchronous, {}),
    ("one step off", OneStepOff, {}),
    ("verl fully async, partial, 24 groups a replica", VerlFullyAsync, {}),
    ("AReaL, admission 4", AReaL, {}),
    ("AReaL, admission 4, 4 x concurrency", AReaL, {"concurrency": 4}),
    ("prime-rl, at most 8 off policy", PrimeRL, {}),
    ("prime-rl, at most 4 off policy", PrimeRL, {"bound": 4}),
    ("KV kept, single slots, admission 4 (no peer)", RollingKept, {}),
)


def run_peer(kind: type[Peer], changed: dict[str, int], groups: int, seed: int, length: Length) -> Row:
    """One model, one world, one seed."""

    async def run() -> Row:
        peer = kind(groups, seed, length)
        for name, value in changed.items():
            setattr(peer, name, value)
        await peer.run()
        return peer.measure()

    return run_virtual(run())


# -- ours -------------------------------------------------------------------------------------------------


class Ours(msgspec.Struct, frozen=True):
    """Our settings, by the number of groups in a version."""

    policy: str
    bounds: dict[int, int]
    interrupt: InterruptMode = "in_place"
    rollout: dict[str, object] = {}


OURS = (
    Ours("ours, in place", {128: 5, 32: 8}),
    Ours("ours, in place, drop", {32: 8}, rollout={"staleness_policy": "drop"}),
    Ours("ours, in place, mask_tokens", {32: 8}, rollout={"staleness_policy": "mask_tokens"}),
    Ours("ours, in place, straggler_wait_s 260", {32: 8}, rollout={"straggler_wait_s": 260.0}),
    Ours("ours, abort", {128: 5}, interrupt="abort"),
)


def config_for(ours: Ours, groups: int) -> Config:
    """The config of a world."""
    return parse_config(
        {
            "model": {"path": "none"},
            "data": {"path": "none"},
            "engine": {"num_engines": ENGINES, "max_running_requests": SLOTS},
            "rollout": {
                "group_size": GROUP,
                "max_concurrent_trajectories": ENGINES * SLOTS,
                "max_staleness": ours.bounds[groups],
                **ours.rollout,
            },
            "weights": {"interrupt": ours.interrupt},
            "routing": {"replay": "off"},
            "trainer": {"groups_per_batch": groups},
        }
    )


def run_ours(ours: Ours, groups: int, seed: int, length: Length) -> Row:
    """The scheduler that runs, one world, one seed."""
    simulation = PlannedRun(versions=length.versions, warmup=length.warmup, seed=seed, scale=SCALE)
    plan = simulate(config_for(ours, groups), WORLD, simulation)
    fields = (
        "trainer_idle",
        "staleness_mean",
        "staleness_p99",
        "staleness_max",
        "dropped",
        "masked",
        "prefilled",
    )
    return {"rel": plan.relative, **{f: getattr(plan, f) for f in fields}, "ks": plan.ks_lengths}


# -- the table --------------------------------------------------------------------------------------------


def plot(path: Path, versions: int) -> None:
    """Throughput and staleness of ours over the bound, in both worlds, with a trajectory for eight."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    for groups in (128, 32):
        longest_s = WORLD.max_tokens * WORLD.step_s(SLOTS)
        version_s = groups * GROUP / fluid_rate(ENGINES, SLOTS, WORLD)
        bounds = range(1, 8) if groups == 128 else range(2, 17, 2)
        plans = []
        for bound in bounds:
            warmup = 4 + round(longest_s / version_s)
            simulation = PlannedRun(versions=versions * 128 // groups, warmup=warmup, coarsen=8)
            config = config_for(Ours("ours", {groups: bound}), groups)
            plans.append(simulate(config, WORLD, simulation))
            print(f"{groups} groups, bound {bound}: rel {plans[-1].relative:.3f}", file=sys.stderr)
        label = f"{groups} groups a version ({longest_s / version_s:.0f} versions for the longest answer)"
        above.plot(bounds, [plan.relative for plan in plans], marker="o", label=label)
        below.plot(bounds, [plan.staleness_mean for plan in plans], marker="o", label="mean")
        below.plot(bounds, [plan.staleness_max for plan in plans], marker=".", linestyle=":", label="max")
    above.set_ylabel("of the fluid bound")
    above.set_ylim(0, 1)
    above.legend()
    below.set_ylabel("staleness of the trained, mean and max")
    below.set_xlabel("rollout.max_staleness")
    figure.savefig(path)


def over_seeds(rows: Sequence[Row]) -> Row:
    """Means; of the oldest the oldest."""
    oldest = ("staleness_p99", "staleness_max")
    return {
        name: max(row[name] for row in rows)
        if name in oldest
        else float(np.mean([row[name] for row in rows]))
        for name in rows[0]
    }


def main() -> None:
    parser = argument_parser(__doc__, quick="one seed, few versions: about a minute and a half")
    parser.add_argument(
        "--plot",
        type=Path,
        help="only draw throughput and staleness over the bound, to here; needs matplotlib",
    )
    options = parser.parse_args()
    if options.plot is not None:
        plot(options.plot, versions=5 if options.quick else 15)
        return
    rows = []
    for groups in (128, 32):
        # Warm up for twice the longest answer, 645 s at full engines: 4 versions of 128 groups, 16 of 32.
        length = Length(versions=20, warmup=8) if groups == 128 else Length(versions=60, warmup=32)
        if options.quick:
            length = Length(versions=length.versions // 5, warmup=length.warmup * 3 // 4)
        jobs = [(name, partial(run_peer, kind, changed, groups)) for name, kind, changed in PEERS]
        jobs += [(o.policy, partial(run_ours, o, groups)) for o in OURS if groups in o.bounds]
        for policy, job in jobs:
            found = over_seeds([job(seed, length) for seed in range(1 if options.quick else 5)])
            rows.append({"policy": policy, "groups": groups, **found})
            print(f"{groups} groups: {policy}: rel {found['rel']:.3f}", file=sys.stderr)
    report(rows, "scheduling policies", options.json)


if __name__ == "__main__":
    main()
