"""What one router repeats, and which rows it is given: without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import AlignmentError, ConfigError
from async_rl.types import TrainBatch
from tests.support.bare_routers import bare_adapter, bare_config, top_k
from tests.support.train_batches import random_batch
from trainer.megatron.replay import (
    ReplayRows,
    RouterReplay,
    RouterReplayAdapter,
    check_rows,
    local_rows,
    moe_layer_numbers,
)

TOKENS = 6


@pytest.fixture(autouse=True)
def no_routers_left() -> Iterator[None]:
    yield
    RouterReplay.clear_global_router_replay_instances()


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> RouterReplayAdapter:
    return bare_adapter(monkeypatch, bare_config(num_moe_experts=8))


@pytest.fixture
def recomputing(monkeypatch: pytest.MonkeyPatch) -> RouterReplayAdapter:
    return bare_adapter(monkeypatch, bare_config(num_moe_experts=8, recompute_granularity="full"))


def route(router: Any, scores: torch.Tensor, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """What Megatron's routing calls: gate scores and the chosen experts."""
    return router.get_replay_topk(scores, k, default_compute_topk=top_k)  # type: ignore[no-any-return]


def rows_of(*pairs: tuple[int, int], known: torch.Tensor | None = None) -> ReplayRows:
    """In every row, one pair of experts for each layer."""
    return ReplayRows(torch.tensor(pairs, dtype=torch.uint8).repeat(TOKENS, 1, 1), known)


def forward(adapter: RouterReplayAdapter, rows: ReplayRows) -> list[list[int]]:
    """A forward pass under replay; what each router chose for the first token."""
    with adapter.replay_micro_batch(0, rows):
        return [route(router, torch.rand(TOKENS, 8))[1][0].tolist() for router in adapter.routers]


def test_each_router_repeats_its_own_layer_with_gates_of_current_scores(adapter: RouterReplayAdapter) -> None:
    scores = torch.rand(TOKENS, 8)
    with adapter.guard_schedule(), adapter.replay_micro_batch(0, rows_of((6, 1), (3, 2))):
        routed = [route(router, scores) for router in adapter.routers]
    for (gates, ids), pair in zip(routed, ([6, 1], [3, 2]), strict=True):
        assert ids.tolist() == [pair] * TOKENS
        torch.testing.assert_close(gates, scores[:, pair], rtol=0, atol=0)


def test_a_token_without_a_row_takes_its_routers_own_choice(adapter: RouterReplayAdapter) -> None:
    scores = torch.zeros(TOKENS, 8)
    scores[:, 7], scores[:, 5] = 2.0, 1.0
    known = torch.tensor([True, True, False, True, False, True])
    with adapter.guard_schedule(), adapter.replay_micro_batch(0, rows_of((0, 1), (2, 3), known=known)):
        first, second = (route(router, scores)[1].tolist() for router in adapter.routers)
    assert first == [[0, 1], [0, 1], [7, 5], [0, 1], [7, 5], [0, 1]]
    assert second == [[2, 3], [2, 3], [7, 5], [2, 3], [7, 5], [2, 3]]


def test_recomputed_micro_batches_repeat_their_rows_in_the_order_of_their_forward_passes(
    recomputing: RouterReplayAdapter,
) -> None:
    scores = torch.rand(TOKENS, 8)
    batches = [rows_of((0, 1), (2, 3)), rows_of((4, 5), (6, 7))]
    with recomputing.guard_schedule():
        for rows in batches:
            forward(recomputing, rows)
        again = [[route(router, scores)[1][0].tolist() for router in recomputing.routers] for _ in batches]
    assert again == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.case(32)
def test_a_schedule_fails_when_a_recomputation_did_not_come(recomputing: RouterReplayAdapter) -> None:
    with pytest.raises(AlignmentError, match=r"after a schedule .* left over"), recomputing.guard_schedule():
        forward(recomputing, rows_of((0, 1), (2, 3)))


def test_a_pass_without_gradients_leaves_nothing_for_a_recomputation(
    recomputing: RouterReplayAdapter,
) -> None:
    with recomputing.guard_schedule(), torch.no_grad():
        assert forward(recomputing, rows_of((0, 1), (2, 3))) == [[0, 1], [2, 3]]


@pytest.mark.case(33)
@pytest.mark.parametrize(
    ("tokens", "k", "pairs", "words"),
    [
        (TOKENS - 1, 2, 2, r"sees 5 tokens .* target is \(6, 2\)"),
        (TOKENS, 3, 2, r"picks 3 experts, but its replay target is \(6, 2\)"),
        (TOKENS, 2, 3, r"2 routers, but its rows are of 3 layers"),
        (TOKENS, 2, 2, r"layers \[5\] were not called"),
    ],
)
def test_a_forward_pass_fails_when_calls_do_not_match_its_rows(
    adapter: RouterReplayAdapter, tokens: int, k: int, pairs: int, words: str
) -> None:
    with pytest.raises(AlignmentError, match=words):
        with adapter.replay_micro_batch(0, rows_of(*[(0, 1)] * pairs)):
            route(adapter.routers[0], torch.rand(tokens, 8), k)


@pytest.mark.case(33)
def test_a_router_fails_when_its_target_is_empty_or_used_up(adapter: RouterReplayAdapter) -> None:
    nothing = ReplayRows(torch.zeros(0, 2, 2, dtype=torch.uint8), None)
    with pytest.raises(AlignmentError, match=r"sees 6 tokens .* target is \(0, 2\)"):
        forward(adapter, nothing)
    with adapter.guard_schedule(), adapter.replay_micro_batch(0, rows_of((5, 6), (5, 6))):
        for router in adapter.routers:
            assert route(router, torch.rand(TOKENS, 8))[1].tolist() == [[5, 6]] * TOKENS
            with pytest.raises(AlignmentError, match=r"without a replay target"):
                route(router, torch.rand(TOKENS, 8))


def test_a_rank_gets_the_rows_of_its_tokens_and_layers() -> None:
    rows = np.arange(5 * 4 * 2, dtype=np.uint8).reshape(5, 4, 2)
    valid = np.array([True, False, True, True, False])
    source = np.array([3, 4, -1, 0, 1], np.int64)
    ids, known = local_rows(rows, valid, source, slice(1, 3), torch.device("cpu"))
    assert known is not None
    assert known.tolist() == [True, False, False, True, False]
    np.testing.assert_array_equal(ids[known].numpy(), rows[[3, 0], 1:3])
    assert ids.dtype == torch.uint8


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"moe_layer_freq": 1}, (1, 2, 3, 4, 5)),
        ({"moe_layer_freq": 2}, (1, 3, 5)),
        ({"moe_layer_freq": [0, 1, 0, 0, 1]}, (2, 5)),
        ({"num_moe_experts": None}, ()),
    ],
)
def test_layers_with_experts_are_those_of_the_pattern(
    fields: dict[str, Any], numbers: tuple[int, ...]
) -> None:
    assert moe_layer_numbers(bare_config(**fields)) == numbers  # type: ignore[arg-type]


def _one_row_too_many(rows: Any, valid: Any, batch: TrainBatch) -> None:
    valid[batch.offsets[2] - 1] = True


def _zero_layer(rows: Any, valid: Any, batch: TrainBatch) -> None:
    rows[batch.offsets[1] : batch.offsets[2], 1] = 0


def _duplicate(rows: Any, valid: Any, batch: TrainBatch) -> None:
    rows[20, 1] = 3


def _out_of_range(rows: Any, valid: Any, batch: TrainBatch) -> None:
    rows[8, 0, 1] = 8


@pytest.mark.case(33, 36)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_one_row_too_many, "trajectory 1 has 7 tokens and as many routing rows"),
        (_zero_layer, "trajectory 1 has only zeros in layer 4"),
        (_duplicate, r"trajectory 2.*layer 4 names an expert twice: \[3, 3\]"),
        (_out_of_range, "trajectory 0 has expert id 8, expected below 8"),
        (lambda r, v, b: {"routed_experts": r[:, :1]}, "MoE layers"),
        (lambda r, v, b: {"routed_experts": r[:-1]}, "routing rows are"),
        (lambda r, v, b: {"routed_experts": r.astype(np.int32)}, "int32, expected uint8 or uint16"),
        (lambda r, v, b: {"num_experts": 16}, "16 experts, but the trainer's has 8"),
        (lambda r, v, b: {"moe_layers": (0, 4)}, r"of the layers \(0, 4\), but .* experts in \(1, 4\)"),
        (lambda r, v, b: {"moe_layers": ()}, r"of the layers \(\), but"),
        (lambda r, v, b: {"routed_experts": None, "routing_valid": None}, "carries no routing rows"),
    ],
    ids=[
        *("row too many", "zero layer", "duplicate", "out of range", "layers", "rows", "type", "experts"),
        *("other layers", "no layers", "none"),
    ],
)
def test_a_batch_is_refused_when_its_rows_are_wrong(change: Callable[..., Any], words: str) -> None:
    config: Any = bare_config(num_moe_experts=8)
    batch = random_batch(layers=(1, 4))
    check_rows(batch, config)
    assert batch.routed_experts is not None
    assert batch.routing_valid is not None
    rows, valid = batch.routed_experts.copy(), batch.routing_valid.copy()
    fields = {"routed_experts": rows, "routing_valid": valid} | (change(rows, valid, batch) or {})
    with pytest.raises(AlignmentError, match=words):
        check_rows(msgspec.structs.replace(batch, **fields), config)


@pytest.mark.parametrize(("tokens", "refused"), [(6, False), (64, False), (65, True)])
def test_rows_pass_when_a_top_1_trajectory_is_short_and_all_zero(tokens: int, refused: bool) -> None:
    config: Any = bare_config(num_moe_experts=8, moe_router_topk=1)
    batch = random_batch(layers=(1, 4), lengths=(tokens,), top_k=1)
    assert batch.routed_experts is not None
    batch.routed_experts[:] = 0
    with pytest.raises(AlignmentError, match=r"only zeros in layer 1") if refused else nullcontext():
        check_rows(batch, config)


@pytest.mark.case(33)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_enable_routing_replay", False),
    ],
)
def test_replay_is_refused_when_the_router_would_not_obey(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        RouterReplayAdapter([], bare_config(**{field: value}))  # type: ignore[arg-type]


def test_rows_that_are_not_valid_are_not_looked_at() -> None:
    batch = random_batch(layers=(1, 4))
    assert batch.routed_experts is not None
    assert batch.routing_valid is not None
    batch.routed_experts[5:9] = 255
    batch.routing_valid[5:9] = False
    check_rows(batch, bare_config(num_moe_experts=8))  # type: ignore[arg-type]


@pytest.mark.parametrize(("experts", "refused"), [(256, False), (257, True)])
def test_rows_are_refused_when_their_type_cannot_name_every_expert(experts: int, refused: bool) -> None:
    """Ids above 255 that became bytes name other experts. With one expert per token nothing else shows it."""
    config: Any = bare_config(num_moe_experts=experts)
    batch = msgspec.structs.replace(random_batch(layers=(1, 4)), num_experts=experts)
    assert batch.routed_experts is not None
    batch.routed_experts[3, 1] = (255, 0)
    too_narrow = pytest.raises(AlignmentError, match="uint8, too narrow for 257 experts")
    with too_narrow if refused else nullcontext():
        check_rows(batch, config)
