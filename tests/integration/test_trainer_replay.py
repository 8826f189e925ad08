"""Routing replay on Megatron-Core's real routers."""

import copy

import msgspec
import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from async_rl.errors import AlignmentError, ConfigError
from tests.support.tiny_model import build_tiny_qwen3, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch, random_rows
from tests.support.trainers import gradients, log_probs_of, native_rows, started, trainer_config
from trainer.megatron.replay import NATIVE, RouterReplayAdapter, check_rows

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:::megatron")]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Three layers, the middle one dense: columns of rows are layers 0 and 2."""
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", dense_layers=(1,), std=0.3)


@pytest.fixture
def worker(moe):
    """A worker that replays. Megatron's groups belong to the process: there is one at a time."""
    with started(trainer_config(moe)) as worker:
        yield worker


def replace(batch, **fields):
    return msgspec.structs.replace(batch, **fields)


def test_routers_are_those_of_the_moe_layers_when_a_layer_is_dense(worker):
    assert [router.layer_number for router in worker.model.replay.routers] == [1, 3]
    assert worker.model.replay.moe_layers == (1, 3)


def test_replay_changes_nothing_when_the_rows_are_the_trainers_own(moe):
    batch = random_batch(layers=2)
    with started(trainer_config(moe, replay=False)) as native:
        expected = native.train_on(batch, 1)
        expected_gradients = gradients(native)
    with started(trainer_config(moe)) as replaying:
        own = replace(batch, routed_experts=native_rows(replaying, batch))
        result = replaying.train_on(own, 1)
        result_gradients = gradients(replaying)
    for key in ("loss", "grad_norm", "entropy"):
        assert result.metrics[key] == expected.metrics[key]
    assert all(torch.equal(result_gradients[name], g) for name, g in expected_gradients.items())


def test_log_probs_follow_the_rows_when_they_are_others(worker):
    batch = random_batch(layers=2)
    own = replace(batch, routed_experts=native_rows(worker, batch))
    others = log_probs_of(worker, batch)
    assert np.abs(others - log_probs_of(worker, own)).mean() > 0.01
    # The order of experts within a row means nothing.
    turned = replace(batch, routed_experts=np.ascontiguousarray(batch.routed_experts[..., ::-1]))
    np.testing.assert_allclose(log_probs_of(worker, turned), others, atol=1e-5)


def test_each_layer_gets_its_own_column_when_rows_differ_by_layer(worker):
    seen = {}

    def watch(router, inputs, outputs):
        seen[router.layer_number] = outputs[1].clone()  # [tokens, experts] bool

    routers = [m for m in worker.model.chunks[0].modules() if isinstance(m, TopKRouter)]
    hooks = [router.register_forward_hook(watch) for router in routers]
    single = random_batch(layers=2, lengths=(24,), group_size=1)
    log_probs_of(worker, single)
    for hook in hooks:
        hook.remove()
    for column, layer in enumerate((1, 3)):
        chosen = np.sort(single.routed_experts[:-1, column], -1)
        np.testing.assert_array_equal(seen[layer].nonzero()[:, 1].view(-1, 2)[:-1].numpy(), chosen)


def test_tokens_route_natively_when_their_rows_are_invalid(worker):
    batch = random_batch(layers=2)
    own = replace(batch, routed_experts=native_rows(worker, batch))
    native = log_probs_of(worker, own)
    none_valid = replace(batch, routing_valid=np.zeros(batch.num_tokens, bool))
    np.testing.assert_array_equal(log_probs_of(worker, none_valid), native)
    # Rows that cannot be true, in the place of rows that are marked invalid, are never looked at.
    start, end = int(batch.offsets[2]), int(batch.offsets[3])
    valid, rows = own.routing_valid.copy(), own.routed_experts.copy()
    valid[start + 4 : end] = False
    rows[start + 4 : end] = 255
    partly = replace(own, routing_valid=valid, routed_experts=rows)
    np.testing.assert_array_equal(log_probs_of(worker, partly), native)


def test_result_is_the_same_when_activations_are_recomputed(moe):
    batch = random_batch(layers=2)
    valid = batch.routing_valid.copy()
    valid[::5] = False
    batch = replace(batch, routing_valid=valid)
    results, calls = {}, {}
    for recompute in ("none", "full", "selective"):
        with started(trainer_config(moe, recompute=recompute, micro_batch_tokens=40)) as worker:
            count = 0

            def counted(router, inputs, outputs):
                nonlocal count
                count += 1

            for module in worker.model.chunks[0].modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(counted)
            results[recompute] = worker.train_on(batch, 1).metrics, gradients(worker)
            calls[recompute] = count
            assert all(not r.replay_backward_list for r in worker.model.replay.routers)
            assert all(r.router_replay_action is None for r in worker.model.replay.routers)
    assert calls["full"] == calls["selective"] == calls["none"] // 2 * 3  # old log-probs, forward, again
    for recompute in ("full", "selective"):
        assert results[recompute][0]["loss"] == results["none"][0]["loss"]
        for name, gradient in results["none"][1].items():
            torch.testing.assert_close(results[recompute][1][name], gradient, atol=1e-7, rtol=1e-5)


def test_schedule_fails_when_a_target_is_left_for_the_backward_pass(worker):
    replay = worker.model.replay
    with pytest.raises(AlignmentError, match=r"after a schedule .* left over"), replay.schedule():
        replay.routers[0].set_target_indices(torch.zeros(3, 2, dtype=torch.long), recomputed=True)
    with replay.schedule():  # nothing leaks into the next one
        pass


def test_router_refuses_when_its_target_has_other_tokens(worker):
    (router, _) = worker.model.replay.routers
    scores = torch.randn(5, 8)
    with worker.model.replay.micro_batch(torch.full((4, 2, 2), NATIVE)):
        with pytest.raises(AlignmentError, match=r"sees 5 tokens .* target is \(4, 2\)"):
            router.get_replay_topk(scores, 2, default_compute_topk=lambda s, k, **_: s.topk(k))
    with pytest.raises(AlignmentError, match=r"without a replay target"):
        router.get_replay_topk(scores, 2, default_compute_topk=lambda s, k, **_: s.topk(k))
    router.clear_router_replay_action()


def with_rows(change):
    batch = random_batch(layers=2)
    rows, valid = batch.routed_experts.copy(), batch.routing_valid.copy()
    fields = change(rows, valid, batch) or {}
    return replace(batch, **({"routed_experts": rows, "routing_valid": valid} | fields))


def _duplicate(rows, valid, batch):
    rows[20, 1] = 3


def _out_of_range(rows, valid, batch):
    rows[8, 0, 1] = 8


def _zero_layer(rows, valid, batch):
    rows[batch.offsets[1] : batch.offsets[2], 1] = 0


def _one_row_too_many(rows, valid, batch):
    valid[batch.offsets[2] - 1] = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_duplicate, "trajectory 2.*layer 2 names an expert twice: \\[3, 3\\]"),
        (_out_of_range, "trajectory 0 has expert id 8, expected below 8"),
        (_zero_layer, "trajectory 1 has only zeros in layer 2"),
        (_one_row_too_many, "trajectory 1 has 7 tokens and as many routing rows"),
        (lambda r, v, b: {"routed_experts": r[:, :1]}, "MoE layers"),
        (lambda r, v, b: {"routed_experts": r[:-1]}, "routing rows are"),
        (lambda r, v, b: {"routed_experts": r.astype(np.int32)}, "int32, expected uint8 or uint16"),
        (lambda r, v, b: {"num_experts": 16}, "16 experts, but the trainer's has 8"),
        (lambda r, v, b: {"routed_experts": None, "routing_valid": None}, "carries no routing rows"),
    ],
)
def test_batch_is_refused_when_its_rows_are_wrong(worker, change, words):
    before = log_probs_of(worker, random_batch(layers=2))
    with pytest.raises(AlignmentError, match=words):
        worker.train_on(with_rows(change), 1)
    np.testing.assert_array_equal(log_probs_of(worker, random_batch(layers=2)), before)


def test_rows_pass_when_a_top_1_trajectory_is_short_and_all_zero(worker):
    config = copy.copy(worker.model.config)
    config.moe_router_topk = 1
    offsets, valid = np.array([0, 6]), np.array([True] * 5 + [False])
    check_rows(np.zeros((6, 2, 1), np.uint8), valid, offsets, 8, config)
    offsets, valid = np.array([0, 60]), np.array([True] * 59 + [False])
    with pytest.raises(AlignmentError, match=r"only zeros in layer 0"):
        check_rows(np.zeros((60, 2, 1), np.uint8), valid, offsets, 8, config)


def test_id_255_is_an_expert_when_there_are_256(worker):
    config = copy.copy(worker.model.config)
    config.num_moe_experts = 256
    rows = random_rows(np.random.default_rng(0), 9, 2, 8, 2)
    rows[3, 1] = (255, 0)
    check_rows(rows, np.array([True] * 8 + [False]), np.array([0, 9]), 256, config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_enable_routing_replay", False),
    ],
)
def test_replay_is_refused_when_the_router_would_not_obey(worker, field, value):
    config = copy.copy(worker.model.config)
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=field):
        RouterReplayAdapter([], config)


def test_replay_is_refused_when_the_model_is_dense(tmp_path):
    path = build_tiny_qwen3(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"no experts: set routing.replay=off"):
        with started(trainer_config(path)):
            pass
