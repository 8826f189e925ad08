"""The journals of a run: one folder for each process that ran sessions. The newest owner's counts.

```
 journal/000003-rollout-worker-0-2/ ── killed ──► its trajectories: owner 3·2^40 + 17
        │ read by the process that continues with them
        ▼
 journal/000003-rollout-worker-1-1/               owner 3·2^40 + 46, which has everything once it is written
```

The driver gives each attempt an owner epoch when it starts in a process, higher than all before, also those
of earlier incarnations of the driver. Records carry it. Of a trajectory in several journals only the records
of the highest epoch count: what a process writes that has lost a trajectory without knowing it counts for
nothing. A process that takes a trajectory over reads what is left of it (`JournalReader`), and writes all of
it under its own epoch; if it ends before, the records of the lower epoch still count.

The driver reads whole journals only when it starts, and keeps no tokens: `JournalFolders` knows which folders
may have which trajectory, and deletes a folder when its process has ended and nothing in it is needed. Where
each node has journals of its own, both are done on the node (`NodeJournals`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from async_rl.errors import NodeUnreachable
from async_rl.observability.metrics import Metrics
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.waits import waiting
from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.store.progress import ProgressReport, TrajectoryProgress
from async_rl.types import root_of

log = logging.getLogger(__name__)

_EPOCH_BITS: Final = 40
"""Owners of one incarnation of the driver, as a power of two: more attempts than any run makes."""

_MAX_FOLDERS: Final = 2
"""Folders that a process reads at the same time: all journals of another process are in memory meanwhile."""

_MAX_READS: Final = 5
"""How often a journal is read whose files change meanwhile, because its process still compacts it."""


class JournalSource(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that may have what is left of a trajectory."""

    folder: str
    newest_version: int | None = None
    """The step of the checkpoint to which the run went back since it was written: what later versions sampled
    counts as sampled by this one, as old as it can be. None when it did not go back."""


class JournalClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a process the owner of an attempt, and names the journals that have what is left of it."""

    owner_epoch: int = 0
    sources: tuple[JournalSource, ...] = ()
    """In the order of their owners, the newest last."""
    oldest_version: int | None = None
    """The age that the driver counts for what is left: older tokens are not used."""


class _Known(msgspec.Struct, frozen=True):
    """What a journal has of one trajectory, without its tokens."""

    owner: tuple[int, int]
    attempt: int
    progress: ProgressReport


_State = TypeVar("_State", _Known, JournalledTrajectory)


def newest_tree(root_id: str, trees: Iterable[Mapping[str, _State]]) -> dict[str, _State]:
    """Return what the newest owner has of a trajectory and its branches, of what several journals have.

    An owner writes the trajectory itself last: without a record of it, its claim was cut short, and what it
    has no record of is still in the journal of the owner before.

    Args:
        root_id: The trajectory.
        trees: What each journal has of it and its branches, by id.
    """
    newest: dict[str, _State] = {}
    for tree in sorted(filter(None, trees), key=_owner_of):
        _, attempt = _owner_of(tree)
        before = {} if root_id in tree else newest
        newest = {name: state for name, state in before.items() if state.attempt == attempt} | dict(tree)
    return newest


def _owner_of(tree: Mapping[str, _State]) -> tuple[int, int]:
    return max(state.owner for state in tree.values())


def read_trees(folder: Path, root_ids: Collection[str]) -> dict[str, dict[str, JournalledTrajectory]]:
    """Read what a folder has of trajectories and their branches, by trajectory; their tokens are copies.

    A process that still writes there may replace its file meanwhile, which is then read again.
    """
    trees: dict[str, dict[str, JournalledTrajectory]] = {root_id: {} for root_id in root_ids}
    found, _ = _read_stable(folder)
    for name, state in found.items():
        if (root_id := root_of(name)) in trees:
            trees[root_id][name] = state.copied()
    return trees


def _read_known(
    folder: Path, alive: Collection[str], newest_version: int | None
) -> tuple[dict[str, dict[str, _Known]], int]:
    """Read how far a folder has trajectories and their branches, by trajectory, and its damaged records."""
    trees: defaultdict[str, dict[str, _Known]] = defaultdict(dict)
    found, damaged = _read_stable(folder)
    for name, state in found.items():
        if (root_id := root_of(name)) in alive:
            progress = state.capped(newest_version).progress
            trees[root_id][name] = _Known(state.owner, state.attempt, progress)
    return trees, damaged


JournalSummary = tuple[dict[str, dict[str, _Known]], int]
"""How far a folder has trajectories and their branches, by trajectory, and its number of damaged records."""


class NodeJournals(Protocol):
    """The journals on another node. All methods may be called from any thread.

    Each begins something, and returns a function that waits until it is done.

    Raises:
        NodeUnreachable: By that function, when there is no answer.
    """

    def begin_read_journals(
        self, base: str, alive: Collection[str], restarts: Mapping[int, int]
    ) -> Callable[[], dict[str, JournalSummary]]:
        """Read them, as `read_journals` does."""
        ...

    def begin_delete_journals(self, folders: Sequence[str]) -> Callable[[], None]:
        """Delete folders."""
        ...


class OtherNodes(NamedTuple):
    """How journals on other nodes are reached; both functions block, and may be called from any thread."""

    addresses: Callable[[], Iterable[str]]
    """Returns the nodes that are there."""
    open_node: Callable[[str], NodeJournals]
    """Returns what reads and deletes journals on one, or raises `NodeUnreachable`."""


def read_journals(
    base: Path,
    alive: Collection[str],
    restarts: Mapping[int, int],
    on_read: Callable[[], None] = lambda: None,
) -> dict[str, JournalSummary]:
    """Read all journals on a node, by the names of their folders.

    Args:
        base: Their parent.
        alive: The trajectories in flight.
        restarts: As that of `JournalFolders`.
        on_read: Called after each folder.
    """
    if not base.is_dir():
        return {}
    summaries: dict[str, JournalSummary] = {}
    for path in sorted(path for path in base.iterdir() if path.is_dir()):
        summaries[path.name] = _read_known(path, alive, _newest_version(path.name, restarts))
        on_read()
    return summaries


def _newest_version(name: str, restarts: Mapping[int, int]) -> int | None:
    """Return the lowest step to which the run went back since the folder with this name was written."""
    number = name.partition("-")[0]
    written_by = int(number) if number.isdecimal() else 0
    return min((step for number, step in restarts.items() if number > written_by), default=None)


def _read_stable(folder: Path) -> tuple[dict[str, JournalledTrajectory], int]:
    for _ in range(_MAX_READS - 1):
        try:
            return read_journal(folder)
        except FileNotFoundError:
            continue
    return read_journal(folder)


_Tree = dict[str, JournalledTrajectory]
"""What is left of a trajectory and its branches, by id."""


class _WantedTree:
    """What one attempt waits for."""

    def __init__(self, root_id: str) -> None:
        self.root_id = root_id
        self.tree: _Tree | None = None


class JournalReader:
    """Reads what other processes left of trajectories, for a process that continues with them.

    All attempts that wait for the same folder share one read of it, as when a rollout worker has ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Read nothing yet."""
        self._metrics = metrics
        self._wanted: defaultdict[str, list[_WantedTree]] = defaultdict(list)  # by folder
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reads = asyncio.Semaphore(_MAX_FOLDERS)

    async def read_claim(
        self, claim: JournalClaim, trajectory_id: str, attempt: int
    ) -> dict[str, JournalledTrajectory]:
        """Return what is left of an attempt and its branches; nothing if it begins anew."""
        if not claim.sources:
            return {}
        trees = [await self._read_tree(source, trajectory_id) for source in claim.sources]
        tree = newest_tree(trajectory_id, trees)
        self._metrics.late_results_total.inc(sum(map(len, trees)) - len(tree))
        oldest = min(
            (v for state in tree.values() if (v := state.oldest_weight_version) is not None), default=None
        )
        if oldest is None:
            self._metrics.attempts_restarted_total.inc()
            log.info("trajectory %s starts from its prompt: no journal has a token of it", trajectory_id)
            return {}
        if any(state.attempt != attempt for state in tree.values()) or (
            claim.oldest_version is not None and oldest < claim.oldest_version
        ):
            log.info("trajectory %s is sampled anew: its journal is of another attempt", trajectory_id)
            return {}
        return tree

    async def _read_tree(self, source: JournalSource, root_id: str) -> _Tree:
        ours, all_wanted = _WantedTree(root_id), self._wanted[source.folder]
        all_wanted.append(ours)
        try:
            with waiting("disk"):
                async with self._locks[source.folder]:
                    if ours.tree is None:
                        unread = [each for each in all_wanted if each.tree is None]
                        names = {each.root_id for each in unread}
                        async with self._reads:
                            found = await wait_out_shortage(
                                lambda: asyncio.to_thread(read_trees, Path(source.folder), names)
                            )
                        for each in unread:
                            each.tree = found[each.root_id]
        finally:
            all_wanted.remove(ours)
            if not all_wanted:
                del self._wanted[source.folder], self._locks[source.folder]
        assert ours.tree is not None, "it was read"
        return {name: state.capped(source.newest_version) for name, state in ours.tree.items()}


class JournalFolders:
    """The driver's view of the journals: who owns which trajectory, and which folders are still needed.

    All methods but `delete_folders` are for the event loop's thread.
    """

    def __init__(
        self,
        base: Path,
        incarnation: int,
        restarts: Mapping[int, int],
        metrics: Metrics | None = None,
        *,
        node: str | None = None,
        others: OtherNodes | None = None,
    ) -> None:
        """Begin with the folders that earlier incarnations of the driver left.

        Args:
            base: The folder of the journals.
            incarnation: The number of this incarnation of the driver.
            restarts: The steps from which this and earlier incarnations continued, by number.
            metrics: Counts damaged records.
            node: The address of this node, where each node has a folder `base` of its own; else None.
            others: The other nodes, where they have such folders.
        """
        self.base = base
        self._node = node
        self._others = others
        self._nodes: dict[Path, str] = {}  # of the folders of workers, where it matters
        self._incarnation = incarnation
        self._restarts = restarts
        self._metrics = metrics or Metrics()
        self._epochs = count((incarnation << _EPOCH_BITS) + 1)
        self._numbers = count(1)
        self._holders: dict[str, list[Path]] = {}  # folders that may have a trajectory, the newest last
        self._owners: dict[Path, Callable[[Sequence[str]], None]] = {}  # of folders that are being written
        self._released: dict[str, None] = {}
        self._claimed_again: set[str] = set()  # since `take_released`
        self._ended: set[Path] = set()  # folders that no process writes any longer
        base.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def restore(
        self, alive: Collection[str], report: Callable[[str], None] = log.info
    ) -> dict[str, ProgressReport]:
        """Read all journals; return how far trajectories in flight and their branches are, by id.

        One folder is read at a time, in a thread, so that memory is bounded by the largest of them. What is
        in flight on other nodes is read there, by all of them at the same time. The journals of a node that
        does not answer are not used any more.

        Args:
            alive: The trajectories in flight; their branches are in flight with them.
            report: Called with a sentence if there are journals to read, which may take a second for each.
        """
        alive = frozenset(alive)
        trees: defaultdict[str, dict[Path, dict[str, _Known]]] = defaultdict(dict)
        folders = sorted(path for path in self.base.iterdir() if path.is_dir())
        if folders:
            report(f"reading {len(folders)} journals of what was in flight")
        done = lost = 0
        with waiting("disk", why=lambda: f"{done} of {len(folders)} journals are read") as wait:
            for folder in folders:
                cap = self._source(folder).newest_version
                found, damaged = await wait_out_shortage(
                    partial(asyncio.to_thread, _read_known, folder, alive, cap)
                )
                for root_id, tree in found.items():
                    trees[root_id][folder] = tree
                lost += damaged
                done += 1
                wait.renew()
        on_nodes = await self._read_other_nodes(alive, folders, report)
        for folder, (found, damaged) in on_nodes.items():
            for root_id, tree in found.items():
                trees[root_id][folder] = tree
            lost += damaged
        if lost:
            log.warning(
                "%d records of the journal are damaged; their trajectories continue from earlier tokens", lost
            )
        self._metrics.journal_corrupt_records_total.inc(lost)
        newest: dict[str, ProgressReport] = {}
        for root_id, of_root in trees.items():
            newest |= {name: each.progress for name, each in newest_tree(root_id, of_root.values()).items()}
            by_owner = sorted(of_root, key=lambda folder: _owner_of(of_root[folder]))
            whole = [index for index, folder in enumerate(by_owner) if root_id in of_root[folder]]
            self._holders[root_id] = by_owner[max(whole, default=0) :]
        self._ended.update(folders, on_nodes)
        if unneeded := self.take_unneeded():
            await asyncio.to_thread(self.delete_folders, unneeded)
        return newest

    async def _read_other_nodes(
        self, alive: Collection[str], ours: Collection[Path], report: Callable[[str], None]
    ) -> dict[Path, JournalSummary]:
        """Read the journals on other nodes, by folder; nodes that see one disk have the same."""
        if self._others is None:
            return {}
        report("other nodes read their journals of what was in flight")
        with waiting("disk", why=lambda: "other nodes read their journals"):
            by_node = await asyncio.to_thread(self._ask_other_nodes, self._others, alive)
        found: dict[Path, JournalSummary] = {}
        for node, summaries in by_node.items():
            for name, summary in summaries.items():
                if (folder := self.base / name) not in found and folder not in ours:
                    found[folder] = summary
                    self._nodes[folder] = node
        return found

    def _ask_other_nodes(
        self, others: OtherNodes, alive: Collection[str]
    ) -> dict[str, dict[str, JournalSummary]]:
        begun: dict[str, Callable[[], dict[str, JournalSummary]]] = {}
        answers: dict[str, dict[str, JournalSummary]] = {}
        for node in sorted(set(others.addresses()) - {self._node}):
            with _unreachable_is_logged(node):
                reader = others.open_node(node)
                begun[node] = reader.begin_read_journals(str(self.base), alive, dict(self._restarts))
        for node, wait in begun.items():
            with _unreachable_is_logged(node):
                answers[node] = wait()
        return answers

    # -- owners --------------------------------------------------------------------------------------------

    def add_owner(
        self, name: str, on_release: Callable[[Sequence[str]], None], node: str | None = None
    ) -> Path:
        """Return the folder for a new process that runs sessions.

        Args:
            name: The process.
            on_release: Called with trajectories that its journal need not have any longer.
            node: The address of its node; None: this one.
        """
        folder = self.base / f"{self._incarnation:06d}-{name}-{next(self._numbers)}"
        self._owners[folder] = on_release
        if node is not None:
            self._nodes[folder] = node
        return folder

    def end_owner(self, folder: Path) -> None:
        """Record that a process has ended, or is lost; its folder stays while something in it is needed."""
        del self._owners[folder]
        self._ended.add(folder)

    def claim_trajectory(self, root_id: str, known: Iterable[TrajectoryProgress]) -> JournalClaim:
        """Return the claim for another run of an attempt.

        Args:
            root_id: The trajectory.
            known: How far it and its branches are; none for an attempt that begins anew.
        """
        oldest = min([v for each in known if (v := each.oldest_version) is not None], default=None)
        return JournalClaim(
            owner_epoch=next(self._epochs),
            sources=()
            if oldest is None
            else tuple(self._source(folder) for folder in self._holders.get(root_id, ())),
            oldest_version=oldest,
        )

    @property
    def on_nodes(self) -> bool:
        """Whether each node has journals of its own."""
        return self._node is not None

    def node_of(self, claim: JournalClaim) -> str | None:
        """Return the node that has what is left of an attempt; None if nothing is, or all nodes have it."""
        if self._node is None or not claim.sources:
            return None
        return self._nodes.get(Path(claim.sources[-1].folder), self._node)

    def record_owner(self, root_id: str, claim: JournalClaim, folder: Path) -> None:
        """Record that an attempt has started in the process that writes to a folder."""
        self._released.pop(root_id, None)  # its frame was lost: it begins again
        self._claimed_again.add(root_id)
        before = [path for path in self._holders.get(root_id, ()) if path != folder]
        self._holders[root_id] = [*before, folder] if claim.sources else [folder]
        if not claim.sources:
            self._notify_owners(before, [root_id])  # of an attempt that has failed

    def record_written(self, folder: Path, root_ids: Iterable[str]) -> None:
        """Record that a folder has all that is left of trajectories: no other folder needs to have it."""
        for root_id in root_ids:
            *before, newest = self._holders.get(root_id, (None,))
            if newest == folder:  # else it has gone on in another process, which needs both
                self._holders[root_id] = [folder]
                self._notify_owners(before, [root_id])

    def release_trajectories(self, trajectory_ids: Iterable[str]) -> None:
        """Let no journal keep trajectories any longer, once the ledger has been flushed."""
        self._released |= dict.fromkeys(map(root_of, trajectory_ids))

    def take_released(self) -> list[str]:
        """Return the trajectories released since the last call; flush the ledger, then `notify_owners`."""
        released, self._released = self._released, {}
        self._claimed_again.clear()
        return list(released)

    def notify_owners(self, released: Iterable[str]) -> None:
        """Let the processes that journal trajectories know that the ledger does not need that any longer."""
        by_folder: defaultdict[Path, list[str]] = defaultdict(list)
        for root_id in released:
            if root_id in self._claimed_again:
                continue
            for folder in self._holders.pop(root_id, ()):
                by_folder[folder].append(root_id)
        for folder, root_ids in by_folder.items():
            self._notify_owners([folder], root_ids)

    def _notify_owners(self, folders: Iterable[Path], root_ids: Sequence[str]) -> None:
        for folder in folders:
            if (on_release := self._owners.get(folder)) is not None:
                on_release(root_ids)

    # -- folders that are not needed -----------------------------------------------------------------------

    def take_unneeded(self) -> list[Path]:
        """Return the folders of ended processes that have nothing of a trajectory in flight, each once."""
        if not self._ended:
            return []
        needed = {folder for folders in self._holders.values() for folder in folders}
        unneeded = sorted(self._ended - needed)
        self._ended &= needed
        return unneeded

    def delete_folders(self, folders: Iterable[Path]) -> None:
        """Delete folders; what cannot be deleted now is deleted by the next incarnation. From any thread.

        It does not wait for other nodes.
        """
        elsewhere: defaultdict[str, list[str]] = defaultdict(list)
        for folder in folders:
            node = self._nodes.pop(folder, self._node)
            if node == self._node or self._others is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                elsewhere[node or ""].append(str(folder))
        for node, paths in elsewhere.items():
            assert self._others is not None, "there are folders on them"
            with _unreachable_is_logged(node):
                self._others.open_node(node).begin_delete_journals(paths)

    def _source(self, folder: Path) -> JournalSource:
        newest_version = _newest_version(folder.name, self._restarts)
        return JournalSource(folder=str(folder), newest_version=newest_version)


@contextmanager
def _unreachable_is_logged(node: str) -> Iterator[None]:
    try:
        yield
    except NodeUnreachable as error:
        log.warning("the journals on node %s are neither read nor deleted now: %s", node, error)
