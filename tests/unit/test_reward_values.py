"""Numbers that may be rewards, where they enter and where a batch is made of them."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.errors import RewardError
from async_rl.rollout.rewards.signatures import parts_of
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.staleness import Backlog
from async_rl.store.packing import pack_groups
from async_rl.types import TurnRecord
from tests.support.stored_batches import store_trajectory
from tests.support.trajectories import make_trajectory


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(3), 3.0),
        (Decimal("0.25"), 0.25),
        (-MAX_REWARD, -MAX_REWARD),
        (Decimal("sNaN"), None),
        (torch.tensor(1.0, device="meta"), None),
        (np.array([1.0]), None),
        (torch.tensor([1.0]), None),
        (1e300, None),
        (-1e39, None),
        (10**400, None),
        (math.nan, None),
        (math.inf, None),
        ("1", None),
        (1 + 0j, None),
        (None, None),
    ],
)
def test_a_reward_is_a_number_that_float32_can_hold(number: Any, value: float | None) -> None:
    assert reward_value(number) == value
    if value is None:
        with pytest.raises(RewardError, match=r"expected a finite number, at most 1e\+30"):
            parts_of({"reward": number})
    else:
        assert parts_of(number) == {"reward": value}
        assert np.isfinite(np.float32(value) - np.float32(-value))


@pytest.mark.parametrize(
    "flaw", [{"reward": 1e300}, {"reward": math.nan}, {"reward": None}, {"turns": -1e39}], ids=str
)
def test_a_stored_group_with_an_impossible_reward_is_dropped_and_the_others_are_trained(
    tmp_path: Path, flaw: dict[str, Any]
) -> None:
    groups: dict[str, Any] = {}
    for name in ("good", "bad"):
        stored = store_trajectory(tmp_path, make_trajectory(name))
        if name == "bad" and "turns" in flaw:
            turn = TurnRecord(start=0, end=stored.num_tokens, finish_reason="stop", reward=flaw["turns"])
            trajectory = replace(make_trajectory(name), turns=(turn,))
            stored = store_trajectory(tmp_path / "turns", trajectory)
        elif name == "bad":
            stored = replace(stored, reward=flaw["reward"])
        groups[name] = [stored]
    pack = partial(pack_groups, backlog=Backlog(2, 1, "wait"), min_group_size=1, facts=None)
    packed = pack(0, groups)
    assert packed.unusable == {"bad": "corrupt"}
    assert pack(0, dict(list(groups.items())[:1])).batch is not None
