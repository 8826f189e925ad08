"""What the journal of a killed rollout worker had, and how old the tokens are that it did not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil

from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.types import Int32Array, root_of
from verification.chaos.engine_faults import SentCall

Trajectories = dict[str, JournalledTrajectory]


class LostJournal(msgspec.Struct, frozen=True):
    """What is known of the journal of one lost rollout worker."""

    num_left: int
    """The sampled tokens in it of trajectories that were not dropped meanwhile."""
    num_used: int
    """The tokens that attempts continued, or discarded because their loops went another way."""
    num_calls: int
    """The engine calls that its worker had under way when it was killed; 0 where it was stopped."""
    oldest_loss_s: float
    """How long before the kill engines had sent the oldest token that no journal has; 0 if there is none."""


def journal_of(process: psutil.Process) -> Path | None:
    """Return the folder of the journal that a process writes; None before its first write."""
    with suppress(psutil.NoSuchProcess):
        for file in process.open_files():
            if (path := Path(file.path)).match("journal/*/journal-*"):
                return path.parent
    return None


def ports_of(process: psutil.Process) -> frozenset[int]:
    """Return the local ports of the connections of a process."""
    with suppress(psutil.NoSuchProcess):
        return frozenset(each.laddr.port for each in process.net_connections("tcp") if each.raddr)
    return frozenset()


def read_journals(folder: Path) -> dict[Path, Trajectories]:
    """Return what each journal of a run has, by its folder."""
    found: dict[Path, Trajectories] = {}
    for each in folder.glob("*/"):
        with suppress(FileNotFoundError):  # it was compacted or deleted meanwhile
            found[each] = read_journal(each)[0]
    return found


def left_in(folder: Path, journals: Mapping[Path, Trajectories]) -> Trajectories:
    """Return what a journal has of the trajectories which no later owner has written."""
    newest: dict[str, int] = {}
    for trajectories in journals.values():
        for name, state in trajectories.items():
            newest[name] = max(newest.get(name, -1), state.owner_epoch)
    return {
        name: state for name, state in journals.get(folder, {}).items() if state.owner_epoch == newest[name]
    }


def count_left(left: Trajectories, attempts: Mapping[str, int]) -> int:
    """Return how many sampled tokens are left of some attempts: the number of each, by trajectory."""
    return sum(
        state.num_sampled_tokens
        for name, state in left.items()
        if attempts.get(root_of(name)) == state.attempt
    )


def calls_under_way(calls: Iterable[SentCall], ports: Collection[int], killed_s: float) -> list[SentCall]:
    """Return the calls over these ports that were under way when their worker was killed."""
    return [call for call in calls if call.port in ports and call.begin_s < killed_s < call.end_s]


def oldest_loss_s(
    cut: Iterable[SentCall],
    calls: Collection[SentCall],
    journals: Iterable[Trajectories],
    killed_s: float,
) -> float:
    """Return how long before a kill the oldest token was sent that no journal has; 0 if there is none.

    Args:
        cut: The calls that were under way; only their trajectories are looked at.
        calls: All calls: the earlier ones of these trajectories may be lost as well.
        journals: What all journals have.
        killed_s: The time of the kill, seconds since the epoch.
    """
    states = [state for trajectories in journals for state in trajectories.values()]
    known = [np.concatenate([segment.token_ids for segment in state.segments]) for state in states]
    oldest_s = killed_s
    for call in cut:
        tokens = np.array(call.token_ids, np.int32)
        num_known = max((_common(tokens, each) for each in known), default=0)
        sent_s: dict[int, float] = {}  # when each lost token was sent, the last time if several
        for each in calls:
            if call.token_ids[: len(each.token_ids)] == each.token_ids:
                for position, moment_s in enumerate(each.sent_s, each.num_prompt):
                    if position >= num_known and moment_s < killed_s:
                        sent_s[position] = max(moment_s, sent_s.get(position, 0.0))
        oldest_s = min([oldest_s, *sent_s.values()])
    return killed_s - oldest_s


def _common(tokens: Int32Array, known: Int32Array) -> int:
    """Return how many tokens a journal has of a call, 0 if it has another trajectory."""
    length = min(len(tokens), len(known))
    return length if np.array_equal(tokens[:length], known[:length]) else 0
