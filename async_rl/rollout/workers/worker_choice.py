"""Which rollout worker runs an attempt: the least loaded, with its siblings, near its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import Final

from async_rl.config import Config
from async_rl.engines.pool import EnginePool
from async_rl.rollout.attempt import Attempt
from async_rl.rollout.workers.failing_workers import FailingWorkers
from async_rl.rollout.workers.worker_handle import WorkerHandle
from async_rl.runtime.waits import waiting
from async_rl.store.spool import AnswerSpool, Spool

_FULL_S: Final = 600.0
"""How long attempts avoid a node that had no space for a frame, if others have some. A shortage is waited out
there for a tenth of that: otherwise attempts would go to and fro between nodes that are all full."""

_SHARE_OF_SLACK: Final = 32
"""A worker is given siblings until it has this part of its share more requests than the least loaded one: an
eighth costs a hundredth of the throughput, because the engines of the others have free slots meanwhile."""

_NO_SHARE: Final = 0.01
"""In place of the share of a worker that has no engine yet: others are preferred, if there are any."""


class WorkerChoice:
    """The workers of a run, and the choice between them."""

    def __init__(
        self, config: Config, pool: EnginePool, spool: Spool | AnswerSpool, clock: Callable[[], float]
    ) -> None:
        """Start without workers.

        Args:
            config: Their number and that of the attempts.
            pool: The engines that they share.
            spool: Knows the nodes that do not answer.
            clock: Monotonic seconds.
        """
        self._pool = pool
        self._spool = spool
        self._clock = clock
        self._max_attempts = config.max_attempts_per_worker
        share = self._share = -(-config.rollout.max_concurrent_trajectories // max(1, config.num_workers))
        self._slack = max(1, min(config.rollout.group_size, share // _SHARE_OF_SLACK))
        self.workers: dict[str, WorkerHandle] = {}
        """The workers that are alive, by name."""
        self.starting: set[str] = set()
        """The names of those that are not."""
        self.free = asyncio.Event()
        """Set when a worker may have capacity again."""
        self.failures = FailingWorkers()
        self._moved: set[str] = set()
        """Trajectories that were moved once, because their loops have raised at once."""
        self._full_until_s: dict[str, float] = {}
        """When a node that had no space is tried again, by node."""
        self._last_chosen: tuple[str, WorkerHandle] | None = None
        """The group of the last attempt, and its worker."""
        self._readers: dict[str, WorkerHandle] = {}
        """The living worker that has read a folder of journals, or is reading it, by folder."""

    def add(self, worker: WorkerHandle) -> None:
        """Let a worker be chosen."""
        self.workers[worker.name] = worker
        self.starting.discard(worker.name)
        self.free.set()

    def remove(self, worker: WorkerHandle) -> None:
        """Choose a worker no longer: it has ended, and is started again."""
        del self.workers[worker.name]
        self.starting.add(worker.name)
        self._readers = {path: reader for path, reader in self._readers.items() if reader is not worker}

    def others(self, worker: WorkerHandle) -> set[str]:
        """Return the names of the others, those that are starting included."""
        return (self.workers.keys() | self.starting) - {worker.name}

    async def choose_for(self, attempt: Attempt, node: str | None) -> tuple[WorkerHandle, bool]:
        """Wait for the worker of an attempt; also return whether it was moved to it.

        Args:
            attempt: The attempt.
            node: The only node that has its journal; None if any worker can read that, or there is none.
        """
        moved, journal = attempt.trajectory_id in self._moved, _journal_of(attempt)
        worker = await self.choose(attempt, node)
        self._moved.discard(attempt.trajectory_id)
        if journal is not None and self.workers.get(worker.name) is worker:
            self._readers[journal] = worker
        self._last_chosen = attempt.group_id, worker
        return worker, moved

    async def choose(self, attempt: Attempt | None = None, node: str | None = None) -> WorkerHandle:
        """Wait for the worker that gets an attempt, or scores a group: the one with the fewest requests.

        Siblings that begin one after the other have the same worker, which tokenises their prompt once,
        unless it then has too many more requests than others. Attempts that go on from the same folder of
        journals have the same worker up to its share of all, because it reads the whole folder: after a
        restart each worker would otherwise read those of all workers.

        While a worker is missing, the others take over its attempts up to a limit, which bounds their memory.
        Where only one node has the journal of an attempt, it waits for a worker there while one is
        starting; without one, it begins anew elsewhere. An attempt that was moved goes to the worker in
        which the fewest loops have raised at once, and the next attempt of one that has failed to another
        worker than that, if there is any.
        """
        moved, avoid, journal = False, None, None
        if attempt is not None:
            moved, avoid = (
                attempt.trajectory_id in self._moved,
                self.failures.pop_failed_in(attempt.trajectory_id),
            )
            journal = _journal_of(attempt)

        def has_capacity(worker: WorkerHandle) -> bool:
            return attempt is None or len(worker.attempts) < self._max_attempts

        while True:
            avoided = self._avoided_nodes
            if node in self._full_until_s:
                node = None
            free = [w for w in self.workers.values() if has_capacity(w)]
            if free and node is None and not avoided and not moved and avoid is None:
                reader = None if journal is None else self._readers.get(journal)
                if reader is not None and len(reader.attempts) < self._share:
                    return reader
                least = min(free, key=self._load)
                last_group, last = self._last_chosen or (None, least)
                is_sibling = attempt is not None and last_group == attempt.group_id
                if is_sibling and last in free and self._load(last, less=self._slack) < self._load(least):
                    return last
                return least
            if near := [w for w in free if w.link.peer_node == node]:
                free = near
            elif node is not None and self.starting:
                free = []
            if moved:
                names = {n for n, w in self.workers.items() if not near or w.link.peer_node == node}
                fewest = min(map(self.failures.num_at_once, names | self.starting), default=0)
                free = [w for w in free if self.failures.num_at_once(w.name) == fewest]
            free = [w for w in free if w.name != avoid] or free
            present = [w for w in free if w.link.peer_node not in avoided]
            if free:  # what a worker stores on a node that does not answer may be lost
                return min(present or free, key=self._load)
            self.free.clear()
            with waiting("rollout worker"):
                await self.free.wait()

    def _load(self, worker: WorkerHandle, less: int = 0) -> float:
        """Return the requests of a worker, without some of them, per engine that it may call."""
        return (len(worker.inboxes) - less) / (self._pool.share_of(worker.grants) or _NO_SHARE)

    def move(self, attempt: Attempt) -> None:
        """Let another worker try an attempt."""
        self._moved.add(attempt.trajectory_id)

    def avoid_node(self, node: str) -> None:
        """Note that a node has no space."""
        self._full_until_s[node] = self._clock() + _FULL_S

    def note_space(self, node: str) -> None:
        """Note that a node has space."""
        self._full_until_s.pop(node, None)

    @property
    def has_space_elsewhere(self) -> bool:
        """Whether a node has no space, and a worker is on another one."""
        avoided = self._avoided_nodes
        return bool(self._full_until_s) and any(
            worker.frame_node not in avoided for worker in self.workers.values()
        )

    @property
    def _avoided_nodes(self) -> Set[str]:
        """Nodes that do not answer, or have no space for frames."""
        now = self._clock()
        self._full_until_s = {node: until_s for node, until_s in self._full_until_s.items() if until_s > now}
        return self._spool.absent | self._full_until_s.keys()


def _journal_of(attempt: Attempt) -> str | None:
    return attempt.claim.sources[-1].folder if attempt.claim.sources else None
