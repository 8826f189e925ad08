"""Runs agent loops: dispatches groups of trajectories, and hands finished groups to the queue.

```
 loop          consumes             waits for                      unblocked by                 produces
 run           tasks (Feeder)       admission, then a free slot    the trainer's version moves; group tasks
                                                                   a trajectory ends
 group         —                    its trajectories               their ends                   Group → queue
 trajectory    a slot               engines, tools, the reward     chunks, pool events          Trajectory
```

A failed trajectory is data: it is retried, then dropped with its reason, and `rollout.groups` decides on its
group. The run ends only if most trajectories fail, with the last error as the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from async_rl.data.feeder import Feeder
from async_rl.engines.pool import EnginePool
from async_rl.rollout.attempt import RolloutBackend
from async_rl.rollout.groups import (
    STRAGGLER,
    GroupInFlight,
    UntrainedGroups,
    advantage_basis,
    can_drop_stragglers,
    decide_group,
)
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.slots import Slots
from async_rl.rollout.trajectory_runner import TrajectoryRunner
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import acting, progressed, waiting
from async_rl.store.archive import Observer
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.ledger import GroupRecord
from async_rl.store.progress import ProgressReport
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Group

log = logging.getLogger(__name__)


class RolloutManager:
    """Keeps as many trajectories in flight as slots and the staleness bound allow."""

    def __init__(
        self,
        context: SessionContext,
        *,
        feeder: Feeder,
        pool: EnginePool,
        queue: TrajectoryQueue,
        backend: RolloutBackend,
        journals: JournalFolders | None = None,
        journalled: Mapping[str, ProgressReport] | None = None,
        observer: Observer | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """Prepare to dispatch, first of all the groups that an earlier process left in flight.

        Args:
            context: What all sessions of the run share.
            feeder: Supplies tasks.
            pool: The engines, whose oldest version is that of a new group.
            queue: Admits groups and receives finished ones.
            backend: Runs the attempts.
            journals: The journals of the run, which record trajectories in flight.
            journalled: How far trajectories of `queue.groups.restored` and their branches are in the
                journals, by id.
            observer: Receives each trajectory when its attempt ends.
            warn: Tells a person that the run trains nothing.
        """
        config = self._config = context.config
        self._context = context
        self._feeder = feeder
        self._pool = pool
        self._queue = queue
        self._groups = queue.groups
        self._journals = journals
        self.trajectories = TrajectoryRunner(context, queue, backend, journals, journalled or {}, observer)
        """Runs the trajectories of the groups."""
        self.slots = Slots(config.rollout.max_concurrent_trajectories)
        self._untrained = UntrainedGroups(config.rollout.max_filtered_groups, warn)
        self._num_groups = 0
        self.drained = asyncio.Event()
        """Set when the data is exhausted or admission has ended, and every group has settled."""

    async def run(self) -> None:
        """Run groups until the trainer ends the run."""
        tasks_changed = self._feeder.retries.changed
        async with self.trajectories.backend, Nursery() as groups:
            await self._dispatch_groups(groups)
            while True:
                tasks_changed.clear()
                if not self._num_groups and not self.drained.is_set():
                    self.drained.set()
                    self._queue.end_data()
                with waiting("trajectories" if self._num_groups else "idle"):
                    await tasks_changed.wait()  # the trainer ends the run
                await self._resume_groups(groups)  # their frames were lost since

    async def _dispatch_groups(self, groups: Nursery) -> None:
        """Dispatch groups until the data is exhausted or admission ends."""
        tasks_changed, new_id = self._feeder.retries.changed, self._context.new_id
        while True:
            await self._resume_groups(groups)
            if not await self._queue.wait_for_admission():
                break
            if self._groups.restored:
                continue
            # The slot comes first: a dispatched group starts to sample at once, so it is not old from the
            # start.
            await self.slots.acquire_slot()
            tasks_changed.clear()
            following = self._feeder.next_task() if self._queue.admits else None
            self._queue.set_tasks_left(following is not None or not self._queue.admits)
            if following is None:
                self.slots.release_slot()
                if self._queue.admits:
                    if not self._num_groups:
                        break  # the data is exhausted
                    with waiting("trajectories"):  # the task of a lost group may be retried
                        await tasks_changed.wait()
                continue
            position, task = following
            trajectory_ids = [new_id() for _ in range(self._config.rollout.group_size)]
            work = GroupInFlight(
                new_id(),
                task,
                position,
                trajectory_ids,
                self._config.rollout.staleness_policy,
                clock=self._context.serving_clock.now,
            )
            oldest_version = self._pool.oldest_version
            self._groups.dispatch_group(
                work.group_id, task.task_id, position, trajectory_ids, oldest_version, work
            )
            self.slots.hand_over(trajectory_ids[0])
            groups.start_task(f"group {work.group_id}", self._run_group(work))
            self._num_groups += 1
            with waiting("slot"):
                # Its siblings come before other groups: members that wait for a slot make a group old.
                await work.all_have_slots.wait()

    async def _resume_groups(self, groups: Nursery) -> None:
        """Resume the groups of an earlier process, and those that have lost frames."""
        while self._groups.restored:
            await self._resume_group(groups, self._groups.restored[0])

    async def _resume_group(self, groups: Nursery, left: GroupRecord) -> None:
        """Resume a group in flight; it has been admitted before."""
        unfinished = [name for name in left.root_ids if name not in left.stored]
        if unfinished:
            await self.slots.acquire_slot()
            if left not in self._groups.restored:  # it was dropped meanwhile
                self.slots.release_slot()
                if self._journals is not None:
                    self._journals.release_trajectories(left.root_ids)
                return
            self.slots.hand_over(unfinished[0])
        work = GroupInFlight(
            left.group_id,
            self._feeder.task_at(left.position),
            left.position,
            left.root_ids,
            self._config.rollout.staleness_policy,
            straggled_s=left.straggled_s,
            clock=self._context.serving_clock.now,
        )
        work.finished.update(left.stored)
        for trajectory_id in unfinished:
            if known := self.trajectories.journalled.get(
                trajectory_id
            ):  # the group is as old as that from now on
                work.begin_attempt(trajectory_id, known)
        self._groups.resume_group(left.group_id, work)
        groups.start_task(f"group {left.group_id}", self._run_group(work))
        self._num_groups += 1
        if unfinished:
            with waiting("slot"):
                await work.all_have_slots.wait()

    # -- groups ----------------------------------------------------------------------------------------

    async def _run_group(self, work: GroupInFlight) -> None:
        """Run the siblings of a group, and hand it in or drop it."""
        try:
            with acting("group", work.group_id):
                if not work.cancelled:
                    await self._run_siblings(work)
                if not work.cancelled:  # a cancelled group is settled already
                    await self._settle_group(work)
        finally:
            for trajectory_id in work.trajectory_ids:
                self.slots.release_slot(trajectory_id)  # one that was cancelled before its start still has it
            work.all_have_slots.set()
        # A group that raises is not settled: it ends the run, which must not look drained instead.
        self._num_groups -= 1
        self._feeder.retries.changed.set()
        if self._journals is not None:
            self._journals.release_trajectories(work.trajectory_ids)

    async def _run_siblings(self, work: GroupInFlight) -> None:
        """Run all unfinished siblings until they have ended, or are dropped as stragglers.

        The first of them has its slot already.
        """
        unfinished = [name for name in work.trajectory_ids if name not in work.finished]
        if not unfinished:
            return  # all had ended before a restart: nothing would wake the wait for stragglers
        without_slot = set(unfinished)
        self._limit_stragglers(work)  # before a restart enough of them may have finished

        async def run_sibling(trajectory_id: str, has_slot: bool) -> None:
            with acting("trajectory", trajectory_id):
                if not has_slot:
                    await self.slots.acquire_slot(trajectory_id)
                without_slot.discard(trajectory_id)
                if not without_slot:
                    work.all_have_slots.set()
                try:
                    tree = await self.trajectories.run_trajectory(trajectory_id, work)
                finally:
                    self.slots.release_slot(trajectory_id)
            progressed()
            work.end_sibling(trajectory_id, tree)
            self._limit_stragglers(work)
            if not isinstance(tree, str):
                names = [trajectory.trajectory_id for trajectory in tree]
                completions = {
                    name: work.unscored[name].completion for name in names if name in work.unscored
                }
                self._groups.finish_tree(*tree, completions=completions)
                if not completions and self._journals is not None:
                    self._journals.release_trajectories([trajectory_id])  # the ledger is written first

        async with waiting("trajectories"), Nursery() as siblings:
            work.stop = siblings.cancel_tasks
            tasks = {
                trajectory_id: siblings.start_task(
                    f"trajectory {trajectory_id}", run_sibling(trajectory_id, index == 0)
                )
                for index, trajectory_id in enumerate(unfinished)
            }
            if (limit_s := self._config.rollout.straggler_wait_s) is not None:
                siblings.start_task(
                    f"stragglers of {work.group_id}",
                    _drop_stragglers(work, tasks, limit_s, self._context.serving_clock),
                )

        if work.unscored and work.can_be_scored and not work.cancelled:
            async with waiting("trajectories"), Nursery() as scoring:
                work.stop = scoring.cancel_tasks
                scoring.start_task(f"reward of group {work.group_id}", self.trajectories.score_group(work))

    def _limit_stragglers(self, work: GroupInFlight) -> None:
        """Start the time limit of the running siblings, if there is one, once enough others have finished."""
        if self._config.rollout.straggler_wait_s is None:
            return
        if can_drop_stragglers(work.num_finished_siblings, len(work.trajectory_ids), self._config.rollout):
            work.enough_finished.set()

    async def _settle_group(self, work: GroupInFlight) -> None:
        """Hand the group to the queue or drop it, according to its siblings and the policy."""
        retries = self._feeder.retries
        rewards = {
            name: advantage_basis(trajectory, self._config.trainer.loss)
            for name, trajectory in work.finished.items()
            if trajectory.reward is not None
        }
        may_retry = retries.may_retry(work.position)
        decision = decide_group(
            rewards, work.dropped, self._config.rollout, may_retry=may_retry, is_scored=not work.unscored
        )
        self._untrained.record_group(decision, work.dropped, self.trajectories.last_error)
        if not decision.train:
            retry = decision.retry and retries.retry_task(work.position, decision.reason)
            self._groups.drop_group(work.group_id, decision.reason, others=work.dropped, retry=retry)
            return
        for trajectory_id, reason in work.dropped.items():
            self._groups.drop_trajectories([trajectory_id], reason)
        await self._queue.put_group(Group(group_id=work.group_id, trajectories=work.trajectories))


async def _drop_stragglers(
    work: GroupInFlight, tasks: Mapping[str, asyncio.Task[None]], limit_s: float, clock: ServingClock
) -> None:
    """Wait until enough siblings have finished, then drop those that take longer than `limit_s`."""
    try:
        with waiting("trajectories"):
            await work.enough_finished.wait()
        left_s = max(0.0, limit_s - work.straggled_s())  # earlier processes have waited too
        with work.waiting_for_stragglers():
            async with clock.timeout(left_s):
                with waiting("trajectories"):
                    await work.all_ended.wait()
    except TimeoutError:
        for trajectory_id in work.running:
            work.end_sibling(trajectory_id, STRAGGLER)
            tasks[trajectory_id].cancel()
