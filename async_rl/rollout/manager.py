"""Runs agent loops: dispatches groups, runs their trajectories, and hands finished groups to the queue.

```
 loop          consumes             waits for                      unblocked by                 produces
 run           tasks (Feeder)       admission, then a free slot    the trainer's version moves; group tasks
                                                                   a trajectory ends
 group         —                    its trajectories               their ends                   Group → queue
 trajectory    a slot               engines, tools, the reward     chunks, pool events          Trajectory
```

A trajectory is attempted until an attempt succeeds, or its attempts are used up:

```
 attempt 1 ── failed ──► attempt 2 ... ──► its trajectories, or the reason of the last failure
    └ its worker ended, or had no space: it continues elsewhere from what the journal has
```

A failed trajectory is data: it is retried, then dropped with its reason, and `rollout.groups` decides on its
group. The run ends only if most trajectories fail, with the last error as the cause.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from async_rl.data.feeder import Feeder
from async_rl.engines.pool import EnginePool
from async_rl.errors import AsyncRLError, PromptTooLong, RewardError, SpoolFull, TimeOver, ToolBroken
from async_rl.rollout.attempt import (
    ATTEMPT_ERRORS,
    Attempt,
    LostWorkers,
    RolloutBackend,
    attempt_boundary,
    rewards_of_group,
)
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
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import acting, progressed, waiting
from async_rl.store.archive import Observer
from async_rl.store.journal_folders import JournalClaim, JournalFolders
from async_rl.store.ledger import GroupRecord
from async_rl.store.progress import ProgressReport, TrajectoryProgress
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import Group, StoredTrajectory, root_of

log = logging.getLogger(__name__)

_ATTEMPT_AGAIN_S: Final = 5.0
"""How long an attempt whose own code found no descriptor or space waits before it is made again."""

_FAILURE_WINDOW: Final = 100
_MIN_FAILURES: Final = 16
"""The number of failures before their share can end a run, so that one bad first task cannot."""


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
                    self._drop_stragglers(work, tasks, limit_s, self._context.serving_clock),
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
        self._groups.record_result(work.group_id, work.finished.values())
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
        self,
        work: GroupInFlight,
        tasks: Mapping[str, asyncio.Task[None]],
        limit_s: float,
        clock: ServingClock,
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
                self.trajectories.count_straggler(trajectory_id, limit_s)
                work.end_sibling(trajectory_id, STRAGGLER)
                tasks[trajectory_id].cancel()


class TrajectoryRunner:
    """Runs the attempts at trajectories, and scores groups that one call scores."""

    def __init__(
        self,
        context: SessionContext,
        queue: TrajectoryQueue,
        backend: RolloutBackend,
        journals: JournalFolders | None,
        journalled: Mapping[str, ProgressReport],
        observer: Observer | None,
    ) -> None:
        """Run nothing yet; the arguments are those of `RolloutManager`."""
        self._config = context.config
        self._context = context
        self._queue = queue
        self.backend = backend
        """Runs the attempts."""
        self._journals = journals
        self.journalled: dict[str, dict[str, TrajectoryProgress]] = {}
        """Progress of trajectories that have not begun again, by root: of it and its branches."""
        for name, progress in journalled.items():
            self.journalled.setdefault(root_of(name), {})[name] = progress
        self._observer = observer or Observer()
        self.running: dict[str, Attempt] = {}
        """The running attempts, by trajectory."""
        self._attempts = {name: n for left in queue.groups.restored for name, n in left.attempts.items()}
        self._recent: deque[str] = deque(maxlen=_FAILURE_WINDOW)
        self.last_error: AsyncRLError | None = None
        """How the last attempt that failed did."""

    async def run_trajectory(
        self, trajectory_id: str, work: GroupInFlight
    ) -> Sequence[StoredTrajectory] | str:
        """Run up to `rollout.max_attempts` attempts.

        Returns:
            The trajectory and its branches, or the reason of the last failure.
        """
        reason = ""
        first, last = self._attempts.pop(trajectory_id, 1), self._config.rollout.max_attempts
        for attempt in range(first, max(first, last) + 1):
            if attempt > first:
                self._queue.groups.ledger.record_attempt(trajectory_id, attempt)
                self._context.metrics.trajectory_retries_total.inc()
            try:
                # What user code could not open or write is no fault of the attempt.
                run_attempt = partial(self._run_attempt, trajectory_id, attempt, work)
                tree = await wait_out_shortage(run_attempt, delay_s=_ATTEMPT_AGAIN_S)
            except ATTEMPT_ERRORS as error:
                task_id = work.task.task_id
                log.warning(
                    "trajectory %s of task %s, attempt %d: %s", trajectory_id, task_id, attempt, error
                )
                self._queue.groups.record_attempt_end(attempt, error, trajectory_id)
                # One broken tool may fail all running attempts at once, and none that begins later.
                if attempt >= last or not isinstance(error, ToolBroken):
                    self._record_attempt(failed=error)
                reason = _drop_reason(error)
                if isinstance(error, PromptTooLong):
                    break  # it would be too long again
            else:
                self._record_attempt(failed=None)
                for trajectory in tree:
                    if trajectory.trajectory_id not in work.unscored:
                        self._record_scored(trajectory, attempt)
                return tree
        return reason

    async def _run_attempt(
        self, trajectory_id: str, number: int, work: GroupInFlight
    ) -> Sequence[StoredTrajectory]:
        """Run an attempt; if its worker ends or has no space, go on from what the journal has."""
        known = self.journalled.pop(trajectory_id, {})
        losses = LostWorkers()
        while True:
            attempt = self._new_attempt(trajectory_id, number, work, known)
            work.begin_attempt(trajectory_id, attempt.progress)
            self.running[trajectory_id] = attempt
            try:
                with attempt_boundary():
                    end = await self.backend.run_attempt(attempt)
            except ATTEMPT_ERRORS as error:
                if not losses.may_go_on(error, attempt):
                    self._observer.failed(attempt.failed(error), number, error)
                    raise
                log.warning("trajectory %s continues in another worker: %s", trajectory_id, error)
                progressed()  # a bounded number of times
                known = {name: ProgressReport.of(each) for name, each in attempt.progress.items()}
                continue
            except SpoolFull as error:
                known = {name: ProgressReport.of(each) for name, each in attempt.progress.items()}
                if not self.backend.has_space_elsewhere:
                    await self._queue.wait_for_space(error)
                continue
            finally:
                del self.running[trajectory_id]
            # A group is scored when all siblings have finished; until then the journal has them.
            work.unscored |= {each.trajectory_id: each for each in end.unscored}
            return end.trajectories

    def _new_attempt(
        self, trajectory_id: str, number: int, work: GroupInFlight, known: Mapping[str, TrajectoryProgress]
    ) -> Attempt:
        journals, claim = self._journals, JournalClaim()
        if journals is not None:
            claim = journals.claim_trajectory(trajectory_id, known.values())
        return Attempt(
            work.task,
            trajectory_id,
            work.group_id,
            number,
            started_s=self._context.clock(),
            claim=claim,
            known=known,
            on_start=lambda folder: (
                journals.record_owner(trajectory_id, claim, folder) if journals is not None else None
            ),
        )

    async def score_group(self, work: GroupInFlight) -> None:
        """Score all trajectories of a group by one call; drop those that it fails, without a retry."""
        trees: dict[str, list[str]] = {}
        for trajectory in work.trajectories:
            if (name := trajectory.trajectory_id) in work.unscored:
                trees.setdefault(root_of(name), []).append(name)
        in_order = [work.unscored[name] for tree in trees.values() for name in tree]
        completions = {each.reward_source: each.completion for each in in_order}
        results = await rewards_of_group(self.backend, work.task, list(completions.values()))
        scores = dict(zip(completions, results, strict=True))
        for root_id, tree in trees.items():
            unscored = {name: work.unscored[name] for name in tree}
            of_tree = {name: scores[each.reward_source] for name, each in unscored.items()}
            failed = [score for score in of_tree.values() if isinstance(score, RewardError)]
            if failed:
                log.warning("trajectory %s of task %s: %s", root_id, work.task.task_id, failed[0])
                self._queue.groups.record_attempt_end(work.unscored[tree[0]].attempt, failed[0], root_id)
                self._record_attempt(failed=failed[0])
                work.drop_finished(root_id, _drop_reason(failed[0]))
                continue
            for name, score in of_tree.items():
                assert not isinstance(score, RewardError), "the tree has none"
                self._record_scored(work.set_reward(name, score), unscored[name].attempt)

    def count_straggler(self, trajectory_id: str, limit_s: float) -> None:
        """Count the running attempt of a trajectory that its group waits for no longer, if there is one."""
        if (attempt := self.running.get(trajectory_id)) is not None:
            late = TimeOver(f"its siblings have waited for it for rollout.straggler_wait_s = {limit_s:g}")
            self._queue.groups.record_attempt_end(attempt.number, late, trajectory_id)

    def _record_scored(self, trajectory: StoredTrajectory, attempt: int) -> None:
        """Record a trajectory that has its outcome and reward; a branch is no attempt of its own."""
        if trajectory.trajectory_id == root_of(trajectory.trajectory_id):
            self._queue.groups.record_attempt_end(attempt, trajectory, trajectory.trajectory_id)
        self._observer.ended(trajectory, attempt)

    def _record_attempt(self, failed: AsyncRLError | None) -> None:
        """Record how an attempt ended, and end the run if most of them fail."""
        self._recent.append("" if failed is None else type(failed).__name__)
        if failed is None:
            return
        self.last_error = failed
        kinds = Counter(filter(None, self._recent))
        failures, share = kinds.total(), self._config.rollout.max_failed_share
        if failures >= _MIN_FAILURES and failures > share * len(self._recent):
            causes = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
            raise AsyncRLError(
                f"{failures} of the last {len(self._recent)} trajectories failed ({causes}), more than "
                f"rollout.max_failed_share = {share} allows; the last one: {failed}"
            ) from failed


def _drop_reason(error: Exception) -> str:
    """Return the reason under which a trajectory is dropped: the error's name, `prompt_too_long`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
