"""What one router repeats, and which rows it is given: without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import AlignmentError, ConfigError
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


@pytest.mark.case(33)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 16}, r"are \(16, \(1, 4\), \(2, 2\)\), expected \(8, "),
        ({"moe_layers": (0, 4)}, r"are \(8, \(0, 4\), "),
        ({"moe_layers": ()}, "another model"),
        ({"routed_experts": np.zeros((30, 1, 2), np.uint8)}, "another model"),
        ({"routed_experts": np.zeros((30, 2, 3), np.uint8)}, "another model"),
        ({"routed_experts": None}, "carries no routing rows"),
    ],
    ids=["experts", "other layers", "no layers", "fewer layers", "experts of a token", "none"],
)
def test_a_batch_is_refused_when_its_rows_are_of_another_model(change: dict[str, Any], words: str) -> None:
    config: Any = bare_config(num_moe_experts=8)
    batch = random_batch(layers=(1, 4))
    check_rows(batch, config)
    with pytest.raises(AlignmentError, match=words):
        check_rows(msgspec.structs.replace(batch, **change), config)


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
