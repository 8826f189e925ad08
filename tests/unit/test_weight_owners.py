"""Which rank owns which tensor of a model."""

from collections.abc import Sequence

import pytest

from async_rl.engine_protocol import TensorSpec
from trainer.megatron.weight_owners import WeightOwners, assign_owners

EXPERTS, LAYERS = 16, 8


def spec(name: str, elements: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="bfloat16", shape=(elements,))


def held_by(stages: int, expert_ranks: int, replicas: int) -> list[tuple[int, Sequence[TensorSpec]]]:
    """What the ranks of a layout hold: embeddings in the first stage and, tied, in the last."""
    held = []
    for stage in range(stages):
        for rank in range(replicas * expert_ranks):
            of_stage = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
            own = [spec("embedding", 4000)] if stage in (0, stages - 1) else []
            for layer in of_stage:
                own += [spec(f"{layer}.attention", 1000), spec(f"{layer}.norm", 8)]
                part = EXPERTS // expert_ranks
                first = rank % expert_ranks * part
                own += [spec(f"{layer}.expert.{e}", 700) for e in range(first, first + part)]
            held.append((stage, own))
    return held


@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (1, 1, 4), (1, 4, 1), (2, 2, 1), (4, 1, 1), (2, 2, 4), (4, 4, 2)], ids=str
)
def test_each_tensor_has_one_owner_that_holds_it_and_owners_share_evenly(
    layout: tuple[int, int, int],
) -> None:
    stages, expert_ranks, replicas = layout
    held = held_by(stages, expert_ranks, replicas)
    owners = assign_owners(held, (0,) * len(held))
    assert len({each.name for each in owners.specs}) == len(owners.specs) == 1 + LAYERS * (2 + EXPERTS)
    for name, rank in owners.rank_of.items():
        assert name in {each.name for each in held[rank][1]}
    assert owners.place_of["embedding"][0] == 0
    # Within a stage: a stage with more layers than others has more to write.
    per_stage = stages_of(owners, held)
    for stage in range(stages):
        shares = [owners.bytes_of(rank) for rank, (own, _) in enumerate(held) if own == stage]
        assert max(shares) <= 1.1 * per_stage[stage] / len(shares) + 2 * 4000


def stages_of(owners: WeightOwners, held: Sequence[tuple[int, object]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for rank, (stage, _) in enumerate(held):
        total[stage] = total.get(stage, 0) + owners.bytes_of(rank)
    return total


def test_the_order_follows_the_steps_of_each_stage() -> None:
    """Ranks that gather together have gathered a tensor before another one of theirs is awaited."""
    owners = assign_owners(held_by(2, 2, 1), (0,) * 4)
    places = [owners.place_of[each.name] for each in owners.specs]
    assert places == sorted(places, key=lambda place: place[::-1])


@pytest.mark.parametrize("senders", [(0,) * 16, tuple(range(16)), tuple(rank // 4 * 4 for rank in range(16))])
def test_engines_take_buckets_in_the_order_in_which_ranks_complete_them(senders: tuple[int, ...]) -> None:
    """A rank that waits with a bucket has done its part in all that come before it."""
    owners = assign_owners(held_by(2, 4, 2), senders)
    plan = owners.plan_buckets(8000)
    assert len(plan) > len(set(senders))
    place = {each.name: index for index, each in enumerate(owners.specs)}
    assert sorted(each.name for bucket in plan for each in bucket.tensors) == sorted(place)
    ends = [place[bucket.tensors[-1].name] for bucket in plan]
    assert ends == sorted(ends)
    for bucket in plan:
        assert {senders[owners.rank_of[each.name]] for each in bucket.tensors} == {bucket.sender}


def test_tensors_that_engines_need_together_have_one_owner() -> None:
    """Of two senders, an engine would drop both."""
    names = [f"model.layers.{layer}.self_attn" for layer in range(5)]
    kinds = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa")
    held = [spec(f"{name}.{kind}.weight", 10) for name in names for kind in kinds]
    other = [spec(each.name.replace("layers.", "layers.1"), 10) for each in held]
    for stages in ([(0, held)] * 3, [(0, held), (1, other), (0, held)]):
        for senders in ((0, 0, 0), (0, 1, 2)):
            owners = assign_owners(stages, senders)
            for name in names:
                assert len({owners.rank_of[f"{name}.{kind}.weight"] for kind in kinds}) == 1
            assert len(set(owners.rank_of.values())) == 3
            for bucket in owners.plan_buckets(1):
                assert [each.name.split(".")[4] for each in bucket.tensors] == list(kinds)
