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
        "plan": lambda: tampered.plan_buckets(100),
        "share": lambda: tampered.share_bucket(0, 100, 1),
        "send": lambda: tampered.send_weights([], 100),
    }
    for _ in range(2):  # not the second time either
        with pytest.raises(WeightSyncError, match="x is unknown"):
            calls[use]()
    assert tampered.shared_buffers == []


def test_other_ranks_leave_the_check_and_the_payloads_to_the_first():
    second = export(rank=1, check=refuse)
    assert [second.share_bucket(number, 24, 3) for number in range(len(second.plan_buckets(24)))] == [[]] * 3
    assert second.shared_buffers == []


def test_a_pass_ends_with_the_tensors_of_its_bucket_when_one_is_not_the_planned_one():
    """Gathering is collective: this rank goes through what the others go through."""
    passed = []

    def tensors():
        for name, tensor in [("a", torch.ones(6)), ("b", torch.ones(2, 2)), ("c", torch.zeros(3))]:
            passed.append(name)
            yield name, tensor

    changing = WeightExport(tensors, 0, torch.device("cpu"), check=lambda specs: None, group_timeout_s=1.0)
    changing.plan_buckets(1000)
    passed.clear()
    changing.planned_specs = [changing.planned_specs[0], changing.planned_specs[2], changing.planned_specs[1]]
    with pytest.raises(WeightSyncError, match="the engines expect"):
        changing.share_bucket(0, 1000, 1)
    assert passed == ["a", "b", "c"]
    changing.close()


def test_there_is_one_clear_error_when_shared_memory_is_too_small(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64, 60, 4))
    with pytest.raises(WeightSyncError, match=r"needs 24 bytes more of shared memory .* has 4: lower"):
        export().allocate_buffers(export().plan_buckets(24))
    with pytest.raises(WeightSyncError):
        shared_buffer(5)
