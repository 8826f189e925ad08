import shutil
from collections import namedtuple

import pytest
import torch

from async_rl.errors import WeightSyncError
from async_rl.weights.shared_memory import shared_buffer
from trainer.weights.weight_export import WeightExport

TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(2, 2)), ("c", torch.zeros(3))]


def export(tensors=TENSORS, rank=0, check=lambda specs: None) -> WeightExport:
    return WeightExport(lambda: iter(tensors), rank, torch.device("cpu"), check=check, group_timeout_s=1.0)


def refuse(specs):
    raise WeightSyncError(f"{specs[0].name} is unknown")


@pytest.mark.parametrize("use", ["plan", "share", "send"])
def test_nothing_is_sent_when_the_tensors_are_refused(use):
    tampered = export([("x", torch.ones(2))], check=refuse)
    calls = {
        "plan": lambda: tampered.plan(100),
        "share": lambda: tampered.share(0, 100, 1),
        "send": lambda: tampered.send([], 100),
    }
    for _ in range(2):  # not the second time either
        with pytest.raises(WeightSyncError, match="x is unknown"):
            calls[use]()
    assert tampered._buffers == []


def test_other_ranks_leave_the_check_and_the_payloads_to_the_first():
    second = export(rank=1, check=refuse)
    assert [second.share(number, 24, 3) for number in range(len(second.plan(24)))] == [[], [], []]
    assert second._buffers == []


def test_a_pass_ends_with_the_tensors_of_its_bucket_when_one_is_not_the_planned_one():
    """Gathering is collective: this rank goes through what the others go through."""
    passed = []

    def tensors():
        for name, tensor in [("a", torch.ones(6)), ("b", torch.ones(2, 2)), ("c", torch.zeros(3))]:
            passed.append(name)
            yield name, tensor

    changing = WeightExport(tensors, 0, torch.device("cpu"), check=lambda specs: None, group_timeout_s=1.0)
    changing.plan(1000)
    passed.clear()
    changing._specs = [changing._specs[0], changing._specs[2], changing._specs[1]]
    with pytest.raises(WeightSyncError, match="the engines expect"):
        changing.share(0, 1000, 1)
    assert passed == ["a", "b", "c"]
    changing.close()


def test_there_is_one_clear_error_when_shared_memory_is_too_small(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64, 60, 4))
    with pytest.raises(WeightSyncError, match=r"needs 24 bytes more of shared memory .* has 4: lower"):
        export().make_room(export().plan(24))
    with pytest.raises(WeightSyncError):
        shared_buffer(5)
