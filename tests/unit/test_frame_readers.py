"""The driver's side of the readers of frames on other nodes, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import GetTimeoutError

from async_rl.errors import NodeUnreachable
from async_rl.placement import frame_readers
from async_rl.placement.frame_readers import FrameReaders, RayFrameReader


class Node:
    """A node on which a journal takes `journal_s`, in front of a `ray.get` that counts time."""

    def __init__(self, num_journals: int, journal_s: float) -> None:
        self._ends_s = num_journals * journal_s
        self._journal_s = journal_s
        self.now_s = 0.0
        self.read_journals = SimpleNamespace(remote=lambda *_: "journals")
        number = SimpleNamespace(remote=lambda: "number")
        self.num_journals_read = SimpleNamespace(options=lambda **_: number)

    def get(self, reference: str, *, timeout: float) -> Any:
        """What `ray.get` does."""
        if reference == "number":
            return int(self.now_s / self._journal_s)
        self.now_s = min(self.now_s + timeout, self._ends_s)
        if self.now_s < self._ends_s:
            raise GetTimeoutError("not yet")
        return {"000001-driver-1": ({}, 0)}


@pytest.mark.parametrize(("journal_s", "answers"), [(100.0, True), (130.0, False)])
def test_a_node_may_take_long_for_many_journals_but_not_for_one(
    monkeypatch: pytest.MonkeyPatch, journal_s: float, answers: bool
) -> None:
    node = Node(20, journal_s)
    monkeypatch.setattr(frame_readers.ray, "get", node.get)
    readers = cast(FrameReaders, SimpleNamespace(actor_on=lambda address: node))
    wait = RayFrameReader(readers, "10.0.0.2").begin_read_journals("/journals", [], {})
    if answers:
        assert wait() == {"000001-driver-1": ({}, 0)}
        assert node.now_s == 2000.0
    else:
        with pytest.raises(NodeUnreachable, match=r"10\.0\.0\.2"):
            wait()
