"""Runs agent loops: one asyncio task a trajectory, groups in, finished groups out.

```
 loop          consumes             waits for                      unblocked by                 produces
 run           tasks (Feeder)       a free slot, then admission    a trajectory ends; the       group tasks
                                                                   trainer's version moves
 group         —                    its trajectories               their ends                   Group → queue
 trajectory    a slot               engines, tools, the reward     chunks, pool events          Trajectory
```

A trajectory that fails is data: it is tried again, then dropped with its reason; what becomes of its group is
decided in `rollout.groups`. Only when most trajectories fail does the run end, with the last error as the
cause.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.data.feeder import Feeder
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.pool import EnginePool
from async_rl.errors import (
    AlignmentError,
    AsyncRLError,
    EngineError,
    PromptTooLong,
    RewardError,
    RolloutError,
    WorkerLost,
)
from async_rl.observability.metrics import Metrics
from async_rl.queue.archive import Observer
from async_rl.queue.journal import Entry, Journal
from async_rl.queue.journal_file import Journalled
from async_rl.queue.outstanding import RestoredGroup
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.attempt import close
from async_rl.rollout.backend import RolloutBackend
from async_rl.rollout.groups import (
    STRAGGLER,
    GroupInFlight,
    GroupPolicy,
    SignalWatch,
    Unscored,
    has_signal,
    judge,
    may_leave_stragglers,
)
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.slots import Slots
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import acting, progressed, waiting
from async_rl.types import Group, Segment, Trajectory, root_of

log = logging.getLogger(__name__)

_ATTEMPT_ENDS: Final = (RolloutError, EngineError, AlignmentError, WorkerLost)
"""What an attempt may raise; anything else ends the run."""

_MAX_LOSSES: Final = 3
"""An attempt during which so many rollout workers ended has failed: it may be what ends them."""

_FAILURE_WINDOW: Final = 100
_MIN_FAILURES: Final = 16
"""So many failures before their share can end a run: one bad first task must not."""


class RolloutManager:
    """Keeps as many trajectories in flight as slots and the staleness bound allow."""

    def __init__(
        self,
        config: Config,
        *,
        feeder: Feeder,
        queue: TrajectoryQueue,
        pool: EnginePool,
        backend: RolloutBackend,
        chat: ChatFormat,
        facts: EngineFacts,
        metrics: Metrics,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        journal: Journal | None = None,
        journalled: dict[str, Journalled] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Take over what an earlier process left in flight.

        `backend` runs the attempts. `journal` is told of what is in flight, `journalled` is what it has of
        the groups in `queue.left`. Of both what is taken up is removed: it holds memory and files. `observer`
        is told how attempts end.
        """
        self._config = config
        self._feeder = feeder
        self._queue = queue
        self._pool = pool
        self._chat = chat
        self._facts = facts
        self._metrics = metrics
        self._new_id = new_id
        self._clock = clock
        self._journal = journal
        self._journalled: dict[str, dict[str, Journalled]] = {}  # by root: it and its branches
        while journalled:
            name, state = journalled.popitem()
            self._journalled.setdefault(root_of(name), {})[name] = state
        self._observer = observer or Observer()
        self.running: dict[str, RolloutSession] = {}
        """Sessions of the attempts under way, by trajectory."""
        self._attempts = {name: n for left in queue.left for name, n in left.attempts.items()}
        self._stage = backend
        self.slots = Slots(config.rollout.max_concurrent_trajectories)
        self._recent: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._last_error: AsyncRLError | None = None
        self._policy = GroupPolicy.of(config.rollout)
        self._signals = SignalWatch(config.rollout.max_filtered_groups)
        self._num_groups = 0
        self._group_ended = asyncio.Event()
        queue.redispatch = self._redispatch
        self.drained = asyncio.Event()
        """Set once nothing more is dispatched and every group has settled."""

    async def run(self) -> None:
        """Dispatch groups until the data is exhausted or the queue admits no more, and see them through."""
        async with self._stage, Nursery() as groups:
            while self._queue.left:
                await self._start_left(groups, self._queue.left[0])
            while True:
                if not await self._queue.admit():
                    break
                # A slot first: a dispatched group starts to sample at once, so it is not born old.
                await self.slots.acquire()
                self._group_ended.clear()
                following = self._feeder.next() if self._queue.admits else None
                if following is None:
                    self.slots.release()
                    if self._queue.admits:
                        if not self._num_groups:
                            break  # the data is exhausted
                        with waiting("trajectories"):  # the task of one that is lost may come again
                            await self._group_ended.wait()
                    continue
                position, task = following
                trajectory_ids = [self._new_id() for _ in range(self._config.rollout.group_size)]
                work = GroupInFlight(
                    self._new_id(), task, position, trajectory_ids, self._config.rollout.staleness_policy
                )
                self._queue.dispatched(
                    work.group_id, task.task_id, position, trajectory_ids, self._pool.oldest_version, work
                )
                self.slots.hand_to(trajectory_ids[0])
                groups.start_task(f"group {work.group_id}", self._group(work))
                self._num_groups += 1
                with waiting("slot"):
                    await work.seated.wait()  # siblings first: members that wait for a slot make a group old
        self.drained.set()
        self._queue.end_of_data()
        await asyncio.Future()  # the trainer ends the run

    async def _start_left(self, groups: Nursery, left: RestoredGroup) -> None:
        """Go on with a group that an earlier process left in flight; it has been admitted long ago."""
        unfinished = [name for name in left.trajectory_ids if name not in left.ended]
        if unfinished:
            await self.slots.acquire()
            if left not in self._queue.left:  # dropped meanwhile
                self.slots.release()
                return
            self.slots.hand_to(unfinished[0])
        work = GroupInFlight(
            left.group_id,
            self._feeder.task_at(left.position),
            left.position,
            left.trajectory_ids,
            self._config.rollout.staleness_policy,
        )
        work.finished.update(left.ended)
        for trajectory_id in unfinished:
            if known := self._journalled.get(trajectory_id):  # it is as old as that from now on
                begun = [Entry(name, state.attempt, state) for name, state in known.items()]
                work.begin(Entry(trajectory_id), begun)
        self._queue.resume(left.group_id, work)
        groups.start_task(f"group {left.group_id}", self._group(work))
        self._num_groups += 1
        if unfinished:
            with waiting("slot"):
                await work.seated.wait()

    # -- groups ----------------------------------------------------------------------------------------

    async def _group(self, work: GroupInFlight) -> None:
        """See a group from its dispatch to its settlement."""
        try:
            with acting("group", work.group_id):
                if not work.cancelled:
                    await self._run_siblings(work)
                if not work.cancelled:  # else it is settled
                    await self._settle(work)
        finally:
            for (
                trajectory_id
            ) in work.trajectory_ids:  # one that was cancelled before it began still has its slot
                self.slots.release(trajectory_id)
            work.seated.set()
            self._num_groups -= 1
            self._group_ended.set()
        self._forget(work.trajectory_ids)

    async def _run_siblings(self, work: GroupInFlight) -> None:
        """Run all siblings that have not ended until they have, or were left behind.

        The first one has its slot already.
        """
        unfinished = [name for name in work.trajectory_ids if name not in work.finished]
        if not unfinished:
            return  # all had ended before a restart: nobody would wake who waits for stragglers
        unseated = set(unfinished)

        async def one(trajectory_id: str, has_slot: bool) -> None:
            with acting("trajectory", trajectory_id):
                if not has_slot:
                    await self.slots.acquire(trajectory_id)
                unseated.discard(trajectory_id)
                if not unseated:
                    work.seated.set()
                try:
                    tree = await self._run_trajectory(trajectory_id, work)
                finally:
                    self.slots.release(trajectory_id)
            progressed()
            work.end(trajectory_id, tree)
            if may_leave_stragglers(work.num_ended_well, len(work.trajectory_ids), self._policy):
                work.enough.set()
            if not isinstance(tree, str):
                branches = (trajectory.trajectory_id for trajectory in tree)
                self._queue.branched(trajectory_id, [name for name in branches if name != trajectory_id])
                if not (work.ended.is_set() or work.unscored):
                    self._queue.finished.add_tree(*tree)

        async with waiting("trajectories"), Nursery() as siblings:
            work.stop = siblings.cancel_tasks
            tasks = {
                trajectory_id: siblings.start_task(
                    f"trajectory {trajectory_id}", one(trajectory_id, index == 0)
                )
                for index, trajectory_id in enumerate(unfinished)
            }
            if (limit_s := self._config.rollout.straggler_wait_s) is not None:
                siblings.start_task(f"stragglers of {work.group_id}", _leave_stragglers(work, tasks, limit_s))

        if work.unscored and not work.cancelled:
            async with waiting("trajectories"), Nursery() as scoring:
                work.stop = scoring.cancel_tasks
                scoring.start_task(f"reward of group {work.group_id}", self._score_group(work))

    async def _settle(self, work: GroupInFlight) -> None:
        """Hand the group in, or drop it, as its siblings' ends and the policy say."""
        rewards = [t.outcome.reward for t in work.finished.values() if t.outcome.reward is not None]
        may_retry = self._feeder.may_retry(work.position)
        verdict = judge(rewards, work.dropped, self._policy, may_retry=may_retry)
        if len(rewards) >= self._policy.min_size and self._policy.dynamic_filtering:
            self._signals.see(signal=has_signal(rewards))
        if not verdict.train:
            retry = verdict.retry and self._redispatch(work.position, verdict.reason)
            self._queue.drop_group(work.group_id, verdict.reason, others=work.dropped, retry=retry)
            return
        for trajectory_id, reason in work.dropped.items():
            self._queue.drop_trajectories([trajectory_id], reason)
        await self._queue.put(
            Group(group_id=work.group_id, task_id=work.task.task_id, trajectories=work.trajectories)
        )

    def _redispatch(self, position: int, reason: str) -> bool:
        """Give the task of a lost group out once more, if it may be; whether it will be."""
        if not self._feeder.may_retry(position):
            return False
        self._feeder.retry(position)
        self._metrics.task_retries_total.labels(reason).inc()
        self._group_ended.set()
        return True

    # -- trajectories ----------------------------------------------------------------------------------

    async def _run_trajectory(self, trajectory_id: str, work: GroupInFlight) -> Sequence[Trajectory] | str:
        """Try until it comes to something or `rollout.max_attempts` is reached; else the last reason.

        What it comes to is the trajectory and its branches.
        """
        reason = ""
        first, last = self._attempts.pop(trajectory_id, 1), self._config.rollout.max_attempts
        for attempt in range(first, max(first, last) + 1):
            if attempt > first:
                self._queue.tried_again(trajectory_id, attempt)
                self._metrics.trajectory_retries_total.inc()
            try:
                tree = await self._attempt(trajectory_id, attempt, work)
            except _ATTEMPT_ENDS as error:
                task_id = work.task.task_id
                log.warning(
                    "trajectory %s of task %s, attempt %d: %s", trajectory_id, task_id, attempt, error
                )
                self._count(failed=error)
                reason = _reason(error)
                if isinstance(error, PromptTooLong):
                    break  # it would be too long again
            else:
                self._count(failed=None)
                for trajectory in tree:
                    if trajectory.trajectory_id not in work.unscored:
                        self._observer.ended(trajectory, attempt)
                return tree
        return reason

    async def _attempt(self, trajectory_id: str, attempt: int, work: GroupInFlight) -> Sequence[Trajectory]:
        """Play a trajectory, again from its tokens whenever the worker ends that plays it."""
        left = self._journalled.pop(trajectory_id, {})
        left = {name: state for name, state in left.items() if state.attempt == attempt}
        for losses_left in reversed(range(_MAX_LOSSES)):
            entries: dict[str, Entry] = {}
            try:
                return await self._play(trajectory_id, attempt, work, left, entries, goes_on=losses_left > 0)
            except WorkerLost as error:
                if not losses_left:
                    raise
                log.warning("trajectory %s goes on elsewhere: %s", trajectory_id, error)
                known = {name: entry.left for name, entry in entries.items()}
                left |= {name: state for name, state in known.items() if state.segments}
        raise AssertionError("the last loss is raised")

    async def _play(
        self,
        trajectory_id: str,
        attempt: int,
        work: GroupInFlight,
        left: dict[str, Journalled],
        entries: dict[str, Entry],
        *,
        goes_on: bool,
    ) -> Sequence[Trajectory]:
        """Play a trajectory once.

        Args:
            trajectory_id: Of the sibling.
            attempt: Which try of it this is.
            work: Its group.
            left: What there is of it and its branches; what is taken up is removed.
            entries: Filled with what is written of it and its branches.
            goes_on: It is played again should its worker end.
        """

        def open_entry(name: str, inherited: Sequence[Segment] = ()) -> Entry:
            replay = left.pop(name, None)
            if replay is not None and inherited and (replay := replay.after(inherited)) is None:
                log.warning("branch %s begins otherwise than before the restart: it is made anew", name)
            if self._journal is None:
                entries[name] = Entry(name, attempt, replay, inherited)
            else:
                entries[name] = self._journal.open(name, attempt, replay, inherited)
            return entries[name]

        def open_branch(name: str, inherited: Sequence[Segment]) -> Entry:
            entry = open_entry(name, inherited)
            work.branch(entry)
            return entry

        entry = open_entry(trajectory_id)
        work.begin(entry, [Entry(name, attempt, state) for name, state in left.items()])
        session = self._stage.session(
            task=work.task,
            trajectory_id=trajectory_id,
            group_id=work.group_id,
            pool=self._pool,
            chat=self._chat,
            facts=self._facts,
            rollout=self._config.rollout,
            routing_config=self._config.routing,
            interrupt=self._config.weights.interrupt,
            metrics=self._metrics,
            new_id=self._new_id,
            clock=self._clock,
            entry=entry,
            open_branch=open_branch,
        )
        self.running[trajectory_id] = session
        try:
            played = await self._stage.play(work.task, session)
            tree = await close(played)
            # Rewards of a group come when all siblings are there; until then the journal has them.
            work.unscored |= {
                each.session.trajectory_id: Unscored(
                    completion=each.completion or each.session.completion,
                    attempt=attempt,
                    reward_source=each.reward_source,
                )
                for each in played
                if each.parts is None
            }
            return tree
        except _ATTEMPT_ENDS as error:
            if not (goes_on and isinstance(error, WorkerLost)):
                self._observer.failed(session.unfinished(error), attempt, error)
            raise
        finally:
            del self.running[trajectory_id]

    async def _score_group(self, work: GroupInFlight) -> None:
        """Score all trajectories of a group by one call; what it fails is dropped, it is not made again."""
        trees: dict[str, list[str]] = {}
        for trajectory in work.trajectories:
            if (name := trajectory.trajectory_id) in work.unscored:
                trees.setdefault(root_of(name), []).append(name)
        waiting_ones = [work.unscored[name] for tree in trees.values() for name in tree]
        spoken = {each.reward_source: each.completion for each in waiting_ones}
        results = await self._stage.score_group(work.task, list(spoken.values()))
        scores = dict(zip(spoken, results, strict=True))
        for root_id, tree in trees.items():
            unscored = {name: work.unscored[name] for name in tree}
            of_tree = {name: scores[each.reward_source] for name, each in unscored.items()}
            failed = [score for score in of_tree.values() if isinstance(score, RewardError)]
            if failed:
                log.warning("trajectory %s of task %s: %s", root_id, work.task.task_id, failed[0])
                self._count(failed=failed[0])
                work.fail(root_id, _reason(failed[0]))
                continue
            for name, score in of_tree.items():
                assert not isinstance(score, RewardError), "the tree has none"
                self._observer.ended(work.reward(name, score), unscored[name].attempt)

    def _forget(self, trajectory_ids: Sequence[str]) -> None:
        """These are kept elsewhere now, or settled: the journal can do without them."""
        if self._journal is not None:
            self._journal.forget(trajectory_ids)

    def _count(self, failed: AsyncRLError | None) -> None:
        """Remember how attempts end, and end the run when most of them fail."""
        self._recent.append(failed is not None)
        self._last_error = failed or self._last_error
        failures = sum(self._recent)
        share = self._config.rollout.max_failed_share
        if failed is not None and failures >= _MIN_FAILURES and failures > share * len(self._recent):
            raise AsyncRLError(
                f"{failures} of the last {len(self._recent)} trajectories failed, more than "
                f"rollout.max_failed_share = "
                f"{share} allows; the last one: {failed}"
            ) from failed


def _reason(error: Exception) -> str:
    """What a trajectory is dropped for."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


async def _leave_stragglers(
    work: GroupInFlight, tasks: Mapping[str, asyncio.Task[None]], limit_s: float
) -> None:
    """Once enough siblings have finished, give the others so long, and then go without them."""
    try:
        with waiting("trajectories"):
            await work.enough.wait()
        async with asyncio.timeout(limit_s):
            with waiting("trajectories"):
                await work.ended.wait()
    except TimeoutError:
        for trajectory_id in work.running:
            work.end(trajectory_id, STRAGGLER)
            tasks[trajectory_id].cancel()
