"""The driver's view of a trajectory in a rollout worker: its last report, and the calls since then."""

from __future__ import annotations

from collections.abc import Callable

from async_rl.rollout.attempt import Attempt
from async_rl.store.progress import ProgressReport, TrajectoryProgress

_NOTHING = ProgressReport()


class RemoteProgress(TrajectoryProgress):
    """How far a trajectory is according to its worker, and to the leases that it was given since.

    Example:
        >>> progress = RemoteProgress()
        >>> progress.begin_call(3)  # a lease of an engine at version 3
        >>> progress.oldest_version
        3
    """

    def __init__(self, known: TrajectoryProgress | None = None) -> None:
        """Begin with what is known, until the worker reports."""
        self._report = known or _NOTHING
        self._leased_versions: list[int] = []
        """The versions of calls since the last report, the running one last."""
        self._is_leased = False
        """Whether the last of them runs."""

    def begin_call(self, weight_version: int) -> None:
        """Record that the worker may begin a call, whose tokens it reports later."""
        self._leased_versions.append(weight_version)
        self._is_leased = True

    def end_call(self) -> None:
        """Record that the call has ended; until the next report it counts for the trajectory's age."""
        self._is_leased = False

    def apply_report(self, report: ProgressReport) -> None:
        """Take over what the worker reports."""
        self._report = report
        self._leased_versions = self._leased_versions[-1:] if self._is_leased else []

    @property
    def oldest_version(self) -> int | None:
        """Implements `TrajectoryProgress.oldest_version`."""
        return self._over_calls(min, self._report.oldest_version)

    @property
    def newest_version(self) -> int | None:
        """Implements `TrajectoryProgress.newest_version`."""
        return self._over_calls(max, self._report.newest_version)

    @property
    def in_turn(self) -> bool:
        """Implements `TrajectoryProgress.in_turn`."""
        return self._report.in_turn

    @property
    def num_turns(self) -> int:
        """Implements `TrajectoryProgress.num_turns`."""
        return self._report.num_turns

    @property
    def num_tokens(self) -> int:
        """Implements `TrajectoryProgress.num_tokens`."""
        return self._report.num_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Implements `TrajectoryProgress.num_sampled_tokens`."""
        return self._report.num_sampled_tokens

    def _over_calls(self, choose: Callable[..., int], reported: int | None) -> int | None:
        """Choose between what was reported and the versions of the calls since."""
        leased = self._leased_versions
        if not leased:
            return reported
        return choose(leased) if reported is None else choose(reported, *leased)


def remote_progress(attempt: Attempt, trajectory_id: str) -> RemoteProgress:
    """Return the progress of a trajectory or branch of an attempt that a worker runs."""
    progress = attempt.progress.get(trajectory_id)
    if type(progress) is not RemoteProgress:  # `isinstance` of a protocol's class takes 20 times as long
        attempt.progress[trajectory_id] = progress = RemoteProgress(progress)
    return progress


def apply_report(attempt: Attempt, trajectory_id: str, report: ProgressReport) -> None:
    """Take over what the worker reports: all that is left of an attempt is in its first report."""
    remote_progress(attempt, trajectory_id).apply_report(report)
    for name in [name for name, each in attempt.progress.items() if isinstance(each, ProgressReport)]:
        del attempt.progress[name]
