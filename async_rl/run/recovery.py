"""Restores queue, feeder and journal from the run folder, and writes them back when an incarnation ends.

An incarnation ends with its process, or with its trainer, which restarts at its newest checkpoint. In both
cases the next one starts here, from the files of the run's folder:

```
 ledger.sqlite   the state of every trajectory, the steps of the trainer     ─► rolled back to the checkpoint
 spool/          finished groups; finished trajectories of unfinished groups ─► not sampled again
 journal/        tokens of what was in flight, up to the last second         ─► sampling continues from there
 trajectories.sqlite   the newest finished trajectories, for inspection      ─► marked after the rollback
```

Only what a kill found unwritten is sampled again; nothing is trained twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from async_rl.config import Config, QueueConfig
from async_rl.data.dataset import order_of
from async_rl.data.feeder import Feeder, TaskRetries
from async_rl.data.order import DataOrder
from async_rl.engine_protocol import EngineFacts
from async_rl.errors import AsyncRLError
from async_rl.observability.metrics import Metrics
from async_rl.run.curriculum_order import CurriculumOrder, result_lag
from async_rl.runtime.files import replace_file
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.supervision import observer
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.waits import sleep_idle, waiting
from async_rl.staleness import Backlog
from async_rl.store import archive, spool
from async_rl.store.archive import Archive
from async_rl.store.frame_reader import FrameReader
from async_rl.store.frames import find_flaws
from async_rl.store.journal import Journal
from async_rl.store.journal_folders import JournalFolders, OtherNodes
from async_rl.store.ledger import Ledger
from async_rl.store.outstanding import OutstandingGroups, frames_in_flight
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import Spool
from async_rl.store.spool_nodes import no_other_nodes
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.types import TakenBatch, Task, root_of

log = logging.getLogger(__name__)

MAX_TASK_RETRIES: Final = 1
"""How often a task is dispatched again after its group was lost: a task whose groups are lost twice is likely
to lose the next one too."""

NODE_LOST_S: Final = 60.0
"""A node with finished trajectories is lost when it has not answered for this time; batches wait until then.
Nodes that swap or whose network switches over answer within half a minute."""

_TICKS: Final = 8
"""A node's absence is counted in this many ticks of the driver."""

_LEDGER_S: Final = 1.0
"""Interval between writes of the ledger where no journal is written, seconds."""

_NODE_FOLDERS: Final = "node_folders.txt"
"""The file in the run's folder that names the folders on nodes."""

_FRAMES_AT_A_TIME: Final = 16
"""Frames that one call of a thread verifies."""

_ARCHIVE_S: Final = 1.0
"""Interval between writes of finished trajectories, seconds."""


def journal_folder(config: QueueConfig, run_dir: Path) -> Path:
    """Return the folder of a run's journals, the same on all nodes."""
    run_dir = run_dir.absolute()
    return run_dir / "journal" if config.journal_dir is None else node_folder(config.journal_dir, run_dir)


def node_folder(parent: str, run_dir: Path) -> Path:
    """Return the folder of a run in one that each node has, for what stays on the node."""
    run_dir = run_dir.absolute()
    digest = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]  # runs of one name share no folder
    return Path(parent).expanduser().absolute() / f"{run_dir.name}-{digest}"


def _report_moved(config: QueueConfig, run_dir: Path) -> None:
    """Log which folders on nodes the run no longer writes into, because it or a setting was changed."""
    parents = [parent for parent in (config.spool_dir, config.journal_dir) if parent is not None]
    folders = {str(node_folder(parent, run_dir)) for parent in parents}
    known = run_dir / _NODE_FOLDERS
    with suppress(OSError):  # the disk may be full
        before = set(known.read_text().splitlines()) if known.exists() else set()
        for folder in sorted(before - folders):
            log.warning(
                "the run has left %s, which its nodes may have: it was moved, or queue.spool_dir or "
                "queue.journal_dir was changed. Finished trajectories there are trained, journals there "
                "are not read: delete the folder on all nodes once a checkpoint has been written",
                folder,
            )
        if before != folders:
            replace_file(known, "\n".join(sorted(folders)).encode())


class RestoredProgress(NamedTuple):
    """How far the trajectories were that an incarnation continues."""

    ledger: Ledger
    """Rolled back to the step of the checkpoint."""
    journals: JournalFolders | None
    """The journals of the run; None where `queue.journal_s` asks for none."""
    journalled: Mapping[str, ProgressReport]
    """How far trajectories in flight and their branches are in the journals, by id."""
    flaws: Mapping[str, str]
    """What is wrong with frames on this node of finished trajectories whose groups are in flight, by id."""
    step: int
    """The step of the checkpoint."""
    node: str
    """The address of this node."""


async def restore_progress(
    config: QueueConfig,
    run_dir: Path,
    step: int,
    metrics: Metrics,
    report: Callable[[str], None] = log.info,
    *,
    node: str = "",
    others: OtherNodes | None = None,
) -> RestoredProgress:
    """Roll the ledger back to a checkpoint, read the journals, and verify frames of groups in flight.

    Args:
        config: The settings of the journals.
        run_dir: The run folder.
        step: Step of the checkpoint that the trainer continues from.
        metrics: The run's metrics.
        report: Called with a sentence if there are journals to read.
        node: The address of this node.
        others: The other nodes, which may have journals of their own.

    Raises:
        AsyncRLError: The ledger cannot be rolled back to the step.
    """
    _report_moved(config, run_dir)
    ledger = Ledger(run_dir / "ledger.sqlite")
    try:
        ledger.rollback(step)
        flaws = await _find_flaws(ledger, run_dir / spool.FOLDER, node, report)
        if config.journal_s is None:
            return RestoredProgress(ledger, None, {}, flaws, step, node)
        journals = JournalFolders(
            journal_folder(config, run_dir),
            ledger.incarnation,
            ledger.restarts,
            metrics,
            node=None if config.journal_dir is None else node,
            others=None if config.journal_dir is None else others,
        )
        journalled = await journals.restore(ledger.in_flight, report)
        return RestoredProgress(ledger, journals, journalled, flaws, step, node)
    except BaseException:
        ledger.close()
        raise


async def _find_flaws(
    ledger: Ledger, directory: Path, node: str, report: Callable[[str], None]
) -> dict[str, str]:
    """Verify the frames on this node of finished trajectories whose groups are in flight.

    There may be gigabytes of them: a few are read at a time, in a thread, so that signals and requests for
    metrics are answered meanwhile.
    """
    frames = frames_in_flight(ledger, directory, node)
    if frames:
        report(f"verifying {len(frames)} finished trajectories of unfinished groups")
    flaws: dict[str, str] = {}
    done = 0
    with waiting("disk", why=lambda: f"{done} of {len(frames)} finished trajectories are verified") as wait:
        while done < len(frames):
            some = frames[done : done + _FRAMES_AT_A_TIME]
            flaws |= await wait_out_shortage(partial(asyncio.to_thread, find_flaws, some))
            done += len(some)
            wait.renew()
    return flaws


class RecoveredState:
    """Queue, feeder and journal of an incarnation, restored from the run folder."""

    def __init__(
        self,
        config: Config,
        progress: RestoredProgress,
        run_dir: Path,
        tasks: Sequence[Task],
        facts: EngineFacts,
        metrics: Metrics,
        clock: Callable[[], float],
        read_batch: Callable[[TakenBatch], Awaitable[Mapping[str, str]]],
        *,
        open_reader: Callable[[str], FrameReader] = no_other_nodes,
    ) -> None:
        """Restore the state from the run folder; this blocks.

        Args:
            config: The run's config.
            progress: The ledger, which belongs to this state from now on, and the journals.
            run_dir: The run folder.
            tasks: The dataset. A group in flight whose task is no longer at its position is dropped.
            facts: The model's facts.
            metrics: The run's metrics.
            clock: Monotonic seconds.
            read_batch: Lets the trainer read the frames of a batch, as `Trainer.read_batch`.
            open_reader: Returns what reads frames on another node.

        Raises:
            SpoolFull: The disk has no space for the journal.
        """
        ledger, self.journals, self.journalled, flaws, step, node = progress
        self._every_s = config.queue.journal_s
        self.archive: Archive | None = None
        if config.run.keep_trajectories:
            self.archive = Archive(
                run_dir / archive.FILE,
                config.run.keep_trajectories,
                pass_reward=config.evaluation.pass_reward,
            )
            self.archive.rollback(step)
        self.journal: Journal | None = None
        """The driver's own; None where `queue.journal_s` asks for none."""
        if self.journals is not None:
            self.journal = Journal(self.journals.add_owner("driver", self._release_entries), metrics)
        retries = self._retries = TaskRetries(
            max_retries=MAX_TASK_RETRIES,
            retry_after=config.trainer.groups_per_batch,
            metrics=metrics,
        )
        spool_dir = config.queue.spool_dir
        self.spool = Spool(
            run_dir / spool.FOLDER,
            config.queue.max_bytes,
            node=node,
            node_directory=None if spool_dir is None else node_folder(spool_dir, run_dir),
            open_reader=open_reader,
        )
        """The frames of finished trajectories."""
        rollout = config.rollout
        backlog = Backlog(
            config.trainer.groups_per_batch, rollout.max_staleness, rollout.staleness_policy, version=step
        )
        self.groups = OutstandingGroups(
            ledger,
            self.spool,
            backlog,
            metrics,
            retry_task=retries.retry_task,
            observer=self.archive,
            clock=clock,
            pass_reward=config.evaluation.pass_reward,
            result_lag=result_lag(config),
        )
        self.queue = TrajectoryQueue(
            self.groups,
            min_group_size=rollout.min_siblings,
            facts=facts if config.routing.from_engine else None,
            read_batch=read_batch,
        )
        self.groups.restore_groups(self.journalled, flaws)
        order: DataOrder = (
            order_of(tasks, config.run.seed, config.data.shuffle)
            if config.data.curriculum is None
            else CurriculumOrder(config, tasks, ledger, metrics)
        )
        for left in tuple(self.groups.restored):
            if tasks[order.task_at(left.position)].task_id != left.task_id:
                log.warning("group %s is dropped: the data has no task %s now", left.group_id, left.task_id)
                self.groups.drop_group(left.group_id, "restart")
        if self.journals is not None:
            kept = {name for left in self.groups.restored for name in left.root_ids}
            roots = dict.fromkeys(map(root_of, self.journalled))
            self.journals.release_trajectories(name for name in roots if name not in kept)
        self._has_nodes = self.spool.has_nodes
        position = ledger.data_position()
        self.feeder = Feeder(
            tasks,
            order,
            config.data.epochs,
            start=position.cursor,
            pending=position.pending,
            retries=retries,
        )

    async def _write_journal(self) -> None:
        """Write new journal entries every `queue.journal_s`; this service never returns."""
        assert self.journals is not None, "this service runs only with a journal"
        assert self.journal is not None, "this service runs only with a journal"
        assert self._every_s is not None, "this service runs only with a journal"
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            # From tick to tick: what a write or a compaction takes does not postpone the next tick.
            due_s = max(due_s + self._every_s, clock())
            await asyncio.sleep(due_s - clock())
            self.groups.record_straggling()
            # The ledger first: it must have the trajectories in the journal, and those that the journal
            # drops.
            released = self.journals.take_released()
            await self.journal.write_in_thread(before=self.groups.flush_ledger)
            self.journals.record_written(self.journal.directory, self.journal.pop_written_claims())
            self.journals.notify_owners(released)
            if unneeded := self.journals.take_unneeded():
                await asyncio.to_thread(self.journals.delete_folders, unneeded)

    async def _write_ledger(self) -> None:
        """Write the ledger every second in a run without a journal: ended groups are not sampled again."""
        while True:
            await sleep_idle(_LEDGER_S)
            await run_to_end(self.groups.flush_ledger)

    def _release_entries(self, root_ids: Sequence[str]) -> None:
        assert self.journal is not None, "it is the owner that releases"
        self.journal.remove_entries(root_ids)

    @property
    def services(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loops that must run as services of the incarnation."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {}
        loops["ledger" if self.journal is None else "journal"] = (
            self._write_ledger if self.journal is None else self._write_journal
        )
        if self._has_nodes:
            loops["spool nodes"] = self._watch_nodes
        if self.archive is not None:
            loops["archive"] = observer(self._write_archive)
        return loops

    async def _watch_nodes(self) -> None:
        """Find nodes that do not answer, and give up those that have not for `NODE_LOST_S`.

        Where a rollout worker of the node answers, the node is there: its reader is replaced. What the worker
        stores would else be lost again and again. Absence is counted in ticks of the driver, which may have
        stalled itself.
        """
        nodes, ticks, tick_s = self.spool.nodes, dict[str, int](), NODE_LOST_S / _TICKS
        while True:
            await sleep_idle(tick_s)
            were_absent = set(nodes.absent)
            if nodes.other_nodes():
                with waiting("idle"):
                    await asyncio.to_thread(nodes.ping_nodes, tick_s)
            ticks = {node: ticks.get(node, 0) + 1 for node in nodes.absent}
            overdue = {node for node, number in ticks.items() if number >= _TICKS}
            for node in {node for node in overdue if nodes.writers[node]}:
                log.warning("the reader of frames on node %s does not answer, its worker does", node)
                await asyncio.to_thread(nodes.replace_reader, node)
                del ticks[node]
            for node in overdue & ticks.keys() - nodes.lost:
                log.error(
                    "node %s has not answered for %.0f s: finished trajectories that it has "
                    "are sampled again",
                    node,
                    NODE_LOST_S,
                )
                self.spool.give_up(node)
            # Where a node that is back has lost frames of groups, these are restored without its absence.
            if were_absent or nodes.absent or self.groups.restored:
                self.groups.follow_nodes()
                self._retries.changed.set()

    async def _write_archive(self) -> None:
        while True:
            await sleep_idle(_ARCHIVE_S)
            assert self.archive is not None, "this service runs only with an archive"
            with waiting("disk"):
                await asyncio.to_thread(self.archive.write_notes)

    def write_and_close(self) -> None:
        """Write all trajectories in flight up to the last token, however the incarnation ends."""
        if self.archive is not None:
            self.archive.close()
        self.groups.discard_unscored()
        if self.journal is None:
            return
        try:
            assert self.journals is not None, "there is one with the driver's journal"
            self.groups.record_straggling()
            self.groups.flush_ledger()
            self.journals.notify_owners(self.journals.take_released())
            self.journal.write_entries()
        except (AsyncRLError, OSError) as error:  # this error may be what ends the incarnation
            log.warning("trajectories in flight could not be journalled to the last token: %s", error)
        finally:
            self.journal.close()
