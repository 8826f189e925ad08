"""Groups of trainer rank 0 and one engine, as far as they need no engine."""

import os

import pytest
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GroupInvite
from async_rl.weights import broadcast
from async_rl.weights.broadcast import WeightGroup

VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("before", [None, "0"])
def test_waits_of_a_group_raise_and_those_of_other_groups_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A dead engine must not end the rank by torch's watchdog, which training keeps."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    seen: list[str | None] = []

    make = c10d.PrefixStore

    def record(name: str, store: Store) -> Store:
        seen.append(os.environ.get(VARIABLE))  # while the group is created
        return make(name, store)

    monkeypatch.setattr(broadcast, "open_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(c10d, "PrefixStore", record)
    invite = GroupInvite(
        group_name="g", host="127.0.0.1", port=1, world_size=1, rank_offset=1, backend="gloo"
    )
    WeightGroup(invite, timeout_s=5).close()
    assert seen[0] == "1"
    assert os.environ.get(VARIABLE) == before
