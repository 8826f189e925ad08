"""Admission by the bound and by the capacity of the spool: open, closed, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rl.staleness import Backlog
from async_rl.store.admission import Admission
from async_rl.store.spool import Spool
from tests.support.trajectories import make_group

GUESS = 64 << 10


def admission_of(folder: Path, most: int | None, max_staleness: int = 4) -> tuple[Admission, Backlog, Spool]:
    backlog = Backlog(groups_per_batch=2, max_staleness=max_staleness, staleness_policy="wait")
    spool = Spool(folder / "spool", None if most is None else most * GUESS)
    return Admission(backlog, spool, version=3), backlog, spool


def test_it_closes_at_the_bound_and_opens_with_the_version_that_engines_serve(tmp_path: Path) -> None:
    admission, backlog, _ = admission_of(tmp_path, None, max_staleness=1)
    for name in "abcd":
        assert admission.is_open
        backlog.add_group(name, 3)
    assert not admission.is_open
    assert "a batch of 2 and a staleness of 1 allow while engines serve version 3" in admission.why_closed()
    for name in "ab":
        backlog.remove_group(name)
    admission.next = 4  # the batch is the trainer's
    assert not admission.is_open
    admission.served = 4
    assert admission.is_open


def test_it_closes_when_what_is_in_flight_may_need_the_capacity(tmp_path: Path) -> None:
    admission, backlog, spool = admission_of(tmp_path, 4)
    for name in "abc":
        backlog.add_group(name, 3)
    assert admission.is_open
    spool.put_group(spool.store_tree(make_group("x").trajectories))
    assert not admission.is_open
    assert admission.holds_in_flight
    assert admission.why_closed() == f"the spool holds {spool.used_bytes} of {4 * GUESS} bytes"
    admission.record_size(2 * GUESS)
    assert not admission.holds_in_flight


def test_groups_of_the_next_batch_are_let_in_whatever_they_need(tmp_path: Path) -> None:
    admission, backlog, spool = admission_of(tmp_path, 2)
    admission.record_size(int(np.iinfo(np.int32).max))
    spool.put_group(spool.store_tree(make_group("x").trajectories))
    assert admission.is_open
    backlog.add_group("a", 3)
    assert admission.is_open
    backlog.add_group("b", 3)
    assert not admission.is_open
    assert admission.holds_in_flight
