"""Runs trajectories: attempt after attempt until one succeeds, and the rewards of whole groups.

```
 trajectory ──► attempt 1 ── failed ──► attempt 2 ... ──► its trajectories, or the reason of the last failure
                   └ its worker ended, or had no space: it continues elsewhere from what the journal has
```

The run ends if most attempts fail, with the last error as the cause.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from async_rl.errors import AsyncRLError, PromptTooLong, RewardError, SpoolFull
from async_rl.rollout.attempt import (
    ATTEMPT_ERRORS,
    Attempt,
    LostWorkers,
    RolloutBackend,
    attempt_boundary,
    rewards_of_group,
)
from async_rl.rollout.groups import GroupInFlight
from async_rl.rollout.session.context import SessionContext
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.waits import progressed
from async_rl.store.archive import Observer
from async_rl.store.journal_folders import JournalClaim, JournalFolders
from async_rl.store.progress import ProgressReport, TrajectoryProgress
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import StoredTrajectory, root_of

log = logging.getLogger(__name__)

_ATTEMPT_AGAIN_S: Final = 5.0
"""How long an attempt whose own code found no descriptor or space waits before it is made again."""

_FAILURE_WINDOW: Final = 100
_MIN_FAILURES: Final = 16
"""The number of failures before their share can end a run, so that one bad first task cannot."""


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
                self._record_attempt(failed=error)
                reason = _drop_reason(error)
                if isinstance(error, PromptTooLong):
                    break  # it would be too long again
            else:
                self._record_attempt(failed=None)
                for trajectory in tree:
                    if trajectory.trajectory_id not in work.unscored:
                        self._observer.ended(trajectory, attempt)
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
                self._record_attempt(failed=failed[0])
                work.drop_finished(root_id, _drop_reason(failed[0]))
                continue
            for name, score in of_tree.items():
                assert not isinstance(score, RewardError), "the tree has none"
                self._observer.ended(work.set_reward(name, score), unscored[name].attempt)

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
