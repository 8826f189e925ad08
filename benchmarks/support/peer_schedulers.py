"""Models of the schedulers of other projects, on coarse engines.

A peer is modelled by what its scheduler decides: what may be in flight, what an update does to it, what a
batch is made of, and what is thrown away. Each model says which project it follows.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec
import numpy as np

from async_rl.engine_protocol import Chunk, DiskUpdate, GenerateRequest, InterruptMode, SamplingParams
from async_rl.planning.coarse_engine import CoarseEngine, mark
from async_rl.planning.virtual_time import run_virtual
from async_rl.planning.workload import EndlessTasks, PlannedTurn
from async_rl.runtime.supervision import Nursery
from benchmarks.support.tables import Row
from benchmarks.support.worlds import FIGURES, SCALE, Length, Policy, World


class Answer(msgspec.Struct):
    """A finished trajectory."""

    sampled: int
    length: int
    """With its prompt and what its tools said."""
    oldest: int


Group = list[Answer]
"""Siblings, all finished."""


class Peer(ABC):
    """A scheduler on coarse engines. Subclasses decide; this trains, updates, and keeps count."""

    interrupt: InterruptMode | None = "abort"
    """What an update does to running calls; None where none is running."""
    resume_after_s = 0.0
    """Seconds after which an aborted call is sent again."""
    colocated = False
    """Whether engines and trainer alternate on all devices."""

    def __init__(self, world: World, groups_per_batch: int, bound: float, seed: int, length: Length) -> None:
        self.world = world
        self.batch = groups_per_batch
        self.bound = bound
        self.length = length
        self.tasks = EndlessTasks(world.workload, SCALE, seed, world.group_size)
        speed = world.workload.engine_speed(world.slots, SCALE)
        engines = world.engines / (1 - world.trainer_share) if self.colocated else world.engines
        self.engines = [CoarseEngine(f"{i}", speed) for i in range(round(engines))]
        self.assigned: Counter[str] = Counter()
        """Trajectories of each engine."""
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

    async def answer(self, number: int, sibling: int, turns: Sequence[PlannedTurn]) -> Answer:
        """One trajectory, over all its calls, which one engine gets: it may have the prefix."""
        trajectory = number * self.world.group_size + sibling + 1
        who = {"trajectory": trajectory, "group": number + 1, "shared": turns[0].read}
        engine = min(self.engines, key=lambda e: self.assigned[e.engine_id])
        self.assigned[engine.engine_id] += 1
        length, oldest = 0, 1 << 30
        try:
            for turn in turns:
                await asyncio.sleep(turn.wait_s)
                length += turn.read
                end = length + turn.sampled
                while True:
                    await self.serving.wait()
                    request = GenerateRequest(
                        request_id="",
                        input_ids=mark(length, stop_at=end, **who),
                        max_new_tokens=turn.sampled,
                        sampling=SamplingParams(),
                    )
                    async for event in engine.generate(request):
                        if isinstance(event, Chunk):
                            length += len(event.token_ids)
                        else:
                            oldest = min([oldest, *(span.weight_version for span in event.version_spans)])
                    if length == end:
                        break
                    await asyncio.sleep(self.resume_after_s)
        finally:
            self.assigned[engine.engine_id] -= 1
        return Answer(sum(turn.sampled for turn in turns), length, oldest)

    async def group(self, number: int) -> Group:
        """All siblings at once."""
        async with Nursery() as siblings:
            asked = [
                siblings.start_task(f"{i}", self.answer(number, i, turns))
                for i, turns in enumerate(self.tasks.turns(number))
            ]
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
        tokens, sampled = (
            sum(getattr(a, kind) for group in groups for a in group) * SCALE for kind in ("length", "sampled")
        )
        seconds = self.world.workload.train_s(tokens, sampled, self.world.fluid)
        if self.colocated:
            seconds *= self.world.trainer_share
        await asyncio.sleep(seconds)
        self.trained += [(self.version, group) for group in groups]
        self.train_s += seconds

    async def update(self) -> None:
        """All engines at once."""
        self.serving.clear()
        interrupt = self.interrupt or "abort"
        version = DiskUpdate(weight_version=self.version + 1, path="")

        async def one(engine: CoarseEngine) -> None:
            await engine.interrupt(interrupt)
            await engine.update_weights(version, flush=interrupt != "in_place")
            await engine.resume_generation(interrupt)

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
        lengths = np.array([a.sampled for _, group in kept for a in group], np.int32)
        figures = (
            len(lengths) / seconds / self.world.fluid,
            1 - train_s / seconds,
            float(ages.mean()),
            int(np.percentile(ages, 99)),
            int(ages.max()),
            dropped / (dropped + len(lengths)),
            0.0,
            fed / decoded,
            self.tasks.ks_distance(lengths),
        )
        return dict(zip(FIGURES, figures, strict=True))


class Synchronous(Peer):
    """Generate a batch, train it, update. Colocated: all devices do the one, then the other.

    Source: the usual trainer of verl (`RayPPOTrainer.fit`) and of slime with `--colocate`.
    """

    interrupt = None
    colocated = True

    async def run(self) -> None:
        """Implements `Peer.run`."""
        batch: list[Group] = []
        while self.version < self.length.warmup + self.length.versions:
            async with Nursery() as nursery:
                asked = [
                    nursery.start_task("group", self.group(next(self.numbers))) for _ in range(self.batch)
                ]
                if not self.colocated:
                    await self.train(batch)
            batch = [task.result() for task in asked]
            if self.colocated:
                await self.train(batch)
            await self.update()


class OneStepOff(Synchronous):
    """The next batch is generated while one is trained; then weights are exchanged.

    Source: verl's `one_step_off_policy`; DeepCoder; slime's `train_async.py`.
    """

    colocated = False


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
    """A quota for each window between two updates, and groups in flight for 1.5 times the slots.

    The quota is 1 + bound batches. What of it is unfinished or queued at the update counts into the next one.
    An update aborts everything; the client sends it again, with what it has, a second later.
    Source: verl `experimental/fully_async_policy`: `staleness_threshold`, `partial_rollout`,
    `max_concurrent_samples`, 24 groups of 8 for a replica of 128 slots.
    """

    resume_after_s = 1.0
    parts = 4
    window = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        concurrent = 3 * self.world.in_flight // 2 // self.world.group_size
        return self.window < (1 + self.bound) * self.batch and self.in_flight < concurrent

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
    Source: AReaL `StalenessManager.get_capacity`, `max_concurrent_rollouts`; η is `max_head_offpolicyness`.
    """

    concurrency = 1
    accepted = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        concurrent = self.concurrency * self.world.in_flight // self.world.group_size
        return self.in_flight < concurrent and self.is_fresh()

    def is_fresh(self) -> bool:
        """Whether one more group keeps to the bound."""
        outstanding = len(self.ready) + self.in_flight + self.accepted
        return outstanding < (self.bound + self.version + 1) * self.batch

    def taken(self) -> None:
        """Implements `Stream.taken`."""
        self.accepted += self.batch


class RollingKept(AReaL):
    """Admission by staleness, slots of single trajectories, engines keep their KV cache: no peer so."""

    interrupt = "in_place"

    def __init__(self, world: World, groups_per_batch: int, bound: float, seed: int, length: Length) -> None:
        super().__init__(world, groups_per_batch, bound, seed, length)
        self.slots = asyncio.Semaphore(world.in_flight)
        self.unseated = 0

    def admits(self) -> bool:
        """Implements `Stream.admits`."""
        return not self.unseated and not self.slots.locked() and self.is_fresh()

    async def answer(self, number: int, sibling: int, turns: Sequence[PlannedTurn]) -> Answer:
        """See `Peer.answer`: in a slot of its own."""
        seated = False
        try:
            async with self.slots:
                seated = True
                self.unseated -= 1
                self.wake()
                return await super().answer(number, sibling, turns)
        finally:
            self.unseated -= not seated
            self.wake()

    def dispatched(self, number: int, task: asyncio.Task[None]) -> None:
        """Implements `Stream.dispatched`."""
        self.unseated += self.world.group_size


class PrimeRL(RollingKept):
    """Slots kept full of single rollouts, engines paused with their KV cache; groups too old are cancelled.

    Source: prime-rl `orchestrator/`: rollouts are counted one by one, `max_off_policy_steps` is held for
    each, time in the queue included.
    """

    def __init__(self, world: World, groups_per_batch: int, bound: float, seed: int, length: Length) -> None:
        super().__init__(world, groups_per_batch, bound, seed, length)
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
        self.num_dropped += self.world.group_size * (len(late) + len(self.ready) - len(fresh))
        self.ready = deque(fresh)
        if late:
            self.wake()


class PeerPolicy(Policy, frozen=True, kw_only=True):
    """A peer with its settings."""

    kind: type[Peer]
    settings: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def interrupts(self) -> InterruptMode | None:
        """Implements `Policy.interrupts`."""
        return self.kind.interrupt

    def run(self, world: World, groups: int, bound: float, seed: int, length: Length) -> Row:
        """Implements `Policy.run`."""

        async def run() -> Row:
            peer = self.kind(world, groups, bound, seed, length)
            for name, value in self.settings.items():
                setattr(peer, name, value)
            await peer.run()
            return peer.measure()

        return run_virtual(run())


_IN_BASE: Final = ("base", 128), ("base", 32)

PEERS: Final = (
    PeerPolicy(name="synchronous, colocated", kind=Synchronous, bound=0),
    PeerPolicy(name="one step off", kind=OneStepOff, bound=1),
    PeerPolicy(name="verl fully async, partial", kind=VerlFullyAsync),
    PeerPolicy(name="verl fully async, partial", kind=VerlFullyAsync, bound=0.5, only=_IN_BASE),
    PeerPolicy(name="AReaL", kind=AReaL),
    PeerPolicy(name="AReaL, 4 x concurrency", kind=AReaL, settings={"concurrency": 4}),
    PeerPolicy(
        name="AReaL, 4 x concurrency", kind=AReaL, settings={"concurrency": 4}, bound=4, only=_IN_BASE[1:]
    ),
    PeerPolicy(name="prime-rl", kind=PrimeRL),
    PeerPolicy(name="prime-rl", kind=PrimeRL, bound=4, only=_IN_BASE),
    PeerPolicy(name="KV kept, single slots (no peer)", kind=RollingKept),
)
"""At the bound of the world; in the base world also at other bounds, where they make a difference."""
