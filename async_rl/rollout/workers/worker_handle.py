"""One incarnation of a rollout worker, as the driver knows it: what it was asked, what it has reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from async_rl.errors import RolloutError, WorkerLost
from async_rl.rollout.attempt import Attempt, AttemptEnd
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    EntriesReleased,
    GroupScored,
    Link,
    LongWait,
    Message,
    ScoreGroup,
    StartAttempt,
)
from async_rl.rollout.workers.worker_grants import WorkerGrants
from async_rl.runtime.waits import WAIT_KINDS, Scope, acting, waiting
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.progress import ProgressReport
from async_rl.types import root_of


class Inbox(Scope):
    """The answer to one attempt, or to one group's reward."""

    def __init__(self, *, num_scores: int = 0, may_move: bool = False) -> None:
        self.num_scores = num_scores
        """How many scores the answer must have."""
        self.may_move = may_move
        """Whether another worker tries the attempt if its loop raises at once."""
        self.has_reported = False
        """Whether the worker has reported the attempt's progress."""
        self._answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def put_message(self, message: Message | Exception) -> bool:
        """Set the answer, or the error in its place; return False when it is no longer awaited."""
        if self._answer.done():
            return False
        if isinstance(message, Exception):
            self._answer.set_exception(message)
        else:
            self._answer.set_result(message)
        return True

    @property
    def message(self) -> Message | None:
        """The answer, if there is one."""
        answer = self._answer
        arrived = answer.done() and not answer.cancelled() and answer.exception() is None
        return answer.result() if arrived else None

    async def answer(self) -> Message:
        """Wait for the answer.

        Raises:
            WorkerLost: The worker has ended.
            TimeoutError: The stall doctor has ended the wait.
        """
        return await self._answer

    def expired(self) -> bool:
        """Implements `Scope.expired`."""
        return self._answer.done()

    def reschedule(self, when: float) -> None:
        """Implements `Scope.reschedule`: ends the wait."""
        self.put_message(TimeoutError())


class WorkerHandle:
    """One incarnation of a worker."""

    def __init__(
        self,
        name: str,
        link: Link,
        completion_folder: Path,
        frame_folder: Path | None,
        frame_node: str,
        grants: Callable[[WorkerHandle], WorkerGrants],
        folders: JournalFolders | None,
    ) -> None:
        self.name = name
        self.link = link
        self.folder: Path | None = None
        """The folder of its journal."""
        if folders is not None:
            self.folder = folders.add_owner(name, self.release_entries, link.peer_node)
        self.journal_bytes = 0
        self.frame_node = frame_node
        """The node that has the frames; empty: the run's folder has them."""
        self.output_folders = ("" if frame_folder is None else str(frame_folder), str(completion_folder))
        """Where it writes frames (empty: nowhere) and completions."""
        self.newest_request = 0
        """The request that it was given last."""
        self.inboxes: dict[int, Inbox] = {}
        self.attempts: dict[int, Attempt] = {}
        """Its running attempts, by request."""
        self._waits: dict[str, waiting] = {}
        """What trajectories wait for, according to the last heartbeat."""
        self.silent_ticks = 0
        """Ticks since it has shown by a heartbeat that it handles messages."""
        self._expected = 0
        """The number of the message that it must have handled to show that."""
        self.has_completed_attempt = False
        self.failure: Exception | None = None
        """The error of its own that ended it."""
        self.grants = grants(self)
        """The engines that it may call."""

    def post_request(self, request: StartAttempt | ScoreGroup, inbox: Inbox) -> None:
        """Send a request, whose answer the inbox gets.

        Raises:
            RolloutError: Its task holds something that messages cannot, such as an integer of more than 64
                bits.
        """
        try:
            self.link.post(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RolloutError(
                f"task {request.task.task_id} cannot be sent to a rollout worker ({error}): "
                "write numbers of more than 64 bits as strings"
            ) from error
        self.newest_request = request.request_id
        self.inboxes[request.request_id] = inbox

    def is_answer(self, message: AttemptEnded | AttemptFailed | GroupScored) -> bool:
        """Return whether a message is about what a request of its own asked for; it may be a late one."""
        request_id = message.request_id
        if (inbox := self.inboxes.get(request_id)) is None:
            return request_id <= self.newest_request
        attempt = self.attempts.get(request_id)
        if attempt is None or isinstance(message, GroupScored):
            return (
                attempt is None
                and isinstance(message, GroupScored)
                and (message.failure is not None or len(message.scores) == inbox.num_scores)
            )
        if isinstance(message, AttemptFailed):
            return message.trajectory.trajectory_id == attempt.trajectory_id
        return message.end.is_of(attempt)

    def has_written(self, end: AttemptEnd) -> bool:
        """Return whether all references of an attempt's end are to files in its folders."""
        frames = {(each.node, each.path.rpartition("/")[0]) for each in end.trajectories}
        completions = {each.path.rpartition("/")[0] for each in end.completions}
        frame_folder, completion_folder = self.output_folders
        return frames <= {(self.frame_node, frame_folder)} and completions <= {completion_folder}

    def record_heartbeat(self, received: int) -> bool:
        """Return whether it has handled the messages that were sent before an earlier heartbeat."""
        if received >= self._expected:
            self.silent_ticks, self._expected = 0, self.link.numbers.sent
            return True
        return False

    def record_progress(self, progress: Sequence[AttemptProgress]) -> bool:
        """Take over how far trajectories are: all that is left of an attempt is in its first report.

        Returns:
            Whether one of them has asked for an engine.

        Raises:
            WorkerLost: A trajectory is not that of its request.
        """
        samples = False
        for each in progress:
            if (attempt := self.attempts.get(each.request_id)) is None:
                continue
            if root_of(each.trajectory_id) != attempt.trajectory_id:
                raise WorkerLost(
                    f"it sent progress of {each.trajectory_id} for request {each.request_id}, expected "
                    f"{attempt.trajectory_id}"
                )
            if not self.inboxes[each.request_id].has_reported:
                self.inboxes[each.request_id].has_reported = True
                attempt.progress.clear()
            attempt.progress[each.trajectory_id] = each.report
            samples |= each.report.in_turn or each.report.num_turns > 0
        return samples

    def assume_sampling(self, version: int) -> None:
        """Assume that all its trajectories sample under a version, until it reports how far they are.

        Engines change their version only after that, so the driver never takes a trajectory for younger than
        it is.
        """
        for attempt in self.attempts.values():
            for name, progress in (attempt.progress or {attempt.trajectory_id: ProgressReport()}).items():
                known = ProgressReport.of(progress)
                oldest = version if known.oldest_version is None else min(version, known.oldest_version)
                newest = version if known.newest_version is None else known.newest_version
                attempt.progress[name] = msgspec.structs.replace(
                    known, oldest_version=oldest, newest_version=newest
                )

    def record_waits(self, waits: Sequence[LongWait], actors: Mapping[str, acting]) -> None:
        """Let trajectories wait in the driver's view for what they wait for in the worker.

        Args:
            waits: What the worker reports.
            actors: The trajectories that it runs.
        """
        known, self._waits = self._waits, {}
        for wait in waits:
            if (actor := actors.get(root_of(wait.trajectory_id))) is None or wait.on not in WAIT_KINDS:
                continue
            name = wait.trajectory_id
            ours = known.pop(name, None)
            if ours is None or (ours.on, ours.target) != (wait.on, wait.target):
                if ours is not None:
                    ours.end(succeeded=False)
                ours = waiting(wait.on, wait.target, why=partial(str, wait.why)).begin(actor)
                ours.since_s -= wait.age_s
            self._waits[name] = ours
        for ours in known.values():
            ours.end(succeeded=False)

    def release_entries(self, root_ids: Sequence[str]) -> None:
        """Let the worker know that its journal need not have trajectories any longer."""
        self.link.post(EntriesReleased(trajectory_ids=tuple(root_ids)))

    def fail_requests(self, cause: str, *, are_excused: bool) -> None:
        """Fail everything that was requested of the worker; `are_excused`: its attempts have not ended it."""
        self.record_waits((), {})
        for request_id, inbox in self.inboxes.items():
            lost, attempt = WorkerLost(cause), self.attempts.get(request_id)
            lost.is_excused = are_excused or (
                attempt is not None and any(each.in_turn for each in attempt.progress.values())
            )
            inbox.put_message(lost)
