"""The nodes that have frames of a run, and which of them do not answer.

With `queue.spool_dir` frames are on the nodes of the processes that wrote them. The driver begins what is
done with them there, and the node's `FrameReader` does it. Only `ping_nodes` and `find_missing` wait for
other nodes.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from async_rl.errors import NodeUnreachable
from async_rl.store.frame_reader import FrameReader
from async_rl.types import StoredTrajectory


class _Request(NamedTuple):
    """What another node was asked for."""

    node: str
    wait: Callable[[], None]
    ask_again: Callable[[], None]
    """Called if the node does not answer, for when it is back."""


def no_other_nodes(node: str) -> FrameReader:
    """Reach no other node: all processes are on this one.

    Raises:
        NodeUnreachable: Always.
    """
    raise NodeUnreachable(f"node {node or 'of the run'} has frames, and only this node can be reached")


class SpoolNodes:
    """Opens a reader for each node that has frames, and knows which nodes are absent or lost."""

    def __init__(
        self,
        local: Mapping[str, FrameReader],
        open_reader: Callable[[str], FrameReader],
        *,
        held: Callable[[], set[str]],
        keep_known: Callable[[FrameReader, str], Callable[[], None]],
    ) -> None:
        """Reach no other node yet.

        Args:
            local: The readers of this node, by the names under which frames refer to it.
            open_reader: Returns what reads the frames on another node.
            held: Returns the nodes whose frames are held.
            keep_known: Lets a reader delete on its node what is not known any more.
        """
        self.local = frozenset(local)
        """The names of this node."""
        self.absent: set[str] = set()
        """Nodes that do not answer: a batch waits for their frames."""
        self.lost: set[str] = set()
        """Nodes among them that have been absent for too long: their frames are lost."""
        self.writers = Counter[str]()
        """By node: rollout workers that answer and store frames there."""
        self._readers = dict(local)
        self._open_reader = open_reader
        self._held = held
        self._keep_known = keep_known
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._unanswered: list[_Request] = []

    def other_nodes(self) -> set[str]:
        """Return the other nodes that have frames, or are absent."""
        with self._lock:
            asked = {request.node for request in self._unanswered}
        return (self._held() | asked | self.absent) - self.local

    def ask(
        self,
        node: str,
        begin: Callable[[FrameReader], Callable[[], None]],
        ask_again: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin something on a node, unless it is absent; `ping_nodes` waits for its end.

        Args:
            node: The node.
            begin: Begins it with the node's reader, and returns a function that waits for its end.
            ask_again: Called if the node does not answer later.
        """
        if node not in self.absent:
            try:
                self._await_later(node, begin(self._open(node)), ask_again)
            except NodeUnreachable:
                self.absent.add(node)  # when it is back, `_open` deletes there

    def find_missing(self, stored: Iterable[StoredTrajectory]) -> set[str]:
        """Return the trajectories whose frames are on nodes (`queue.spool_dir`) that have no file of them.

        Raises:
            NodeUnreachable: Such a node does not answer; the error names it.
        """
        by_node: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for entry in stored:
            if entry.node:
                by_node[entry.node][entry.path] = entry.trajectory_id
        missing: set[str] = set()
        for node, names in by_node.items():
            try:
                found = self._open(node).begin_find_missing(list(names))()
            except NodeUnreachable as error:
                self._forget_ended_reader(node, error)
                error.node = node
                raise
            missing.update(names[path] for path in found)
        return missing

    def ping_nodes(self, limit_s: float) -> None:
        """Ask the other nodes for an answer within a time, and update `absent` and `lost`."""
        for node, failure in self._ping(self.other_nodes(), limit_s):
            if node in self.absent and failure is None:
                self._keep_only_known(self._open(node), node)  # processes there may have ended meanwhile
                self.absent.discard(node)
                self.lost.discard(node)
        with self._lock:
            unanswered, self._unanswered = self._unanswered, []
        for request in unanswered:
            if request.node not in self.absent:
                try:
                    request.wait()
                    continue
                except NodeUnreachable:
                    self.absent.add(request.node)
            request.ask_again()

    def replace_reader(self, node: str) -> None:
        """End the reader of a node that does not answer; the next `ping_nodes` starts another one."""
        with self._opening:
            reader = self._readers.pop(node, None)
        if reader is not None:
            reader.end()
        self.lost.discard(node)  # what is stored there from now on waits for the next reader

    def _ping(self, nodes: Iterable[str], limit_s: float) -> list[tuple[str, NodeUnreachable | None]]:
        """Ask nodes at the same time; one that does not answer is absent from now on."""
        waits: list[tuple[str, Callable[[], None]]] = []
        failures: list[tuple[str, NodeUnreachable | None]] = []
        for node in sorted(nodes):
            try:
                waits.append((node, self._open(node).begin_ping(limit_s)))
            except NodeUnreachable as error:
                failures.append((node, error))
        for node, wait in waits:
            try:
                wait()
                failures.append((node, None))
            except NodeUnreachable as error:
                failures.append((node, error))
        for node, failure in failures:
            if failure is not None:
                self.absent.add(node)
                self._forget_ended_reader(node, failure)
        return failures

    def _forget_ended_reader(self, node: str, failure: NodeUnreachable) -> None:
        """Let another reader start at the next request if the one of a node has ended."""
        if failure.reader_has_ended:
            with self._opening:
                self._readers.pop(node, None)

    def _open(self, node: str) -> FrameReader:
        """Return the reader of a node. Its first one deletes there what is not known any more.

        Raises:
            NodeUnreachable: It cannot be started.
        """
        with self._opening:
            if (reader := self._readers.get(node)) is None:
                reader = self._readers[node] = self._open_reader(node)
                self._keep_only_known(reader, node)
        return reader

    def _keep_only_known(self, reader: FrameReader, node: str) -> None:
        self._await_later(node, self._keep_known(reader, node), lambda: None)

    def _await_later(self, node: str, wait: Callable[[], None], ask_again: Callable[[], None]) -> None:
        if node not in self.local:
            with self._lock:
                self._unanswered.append(_Request(node, wait, ask_again))
