"""Routing replay on Megatron-Core's real routers."""

from dataclasses import replace as replaced

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.errors import AlignmentError, ConfigError
from tests.support.tiny_model import build_tiny_qwen3, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gradients,
    log_probs_of,
    native_rows,
    place,
    started,
    trainer_config,
    weights,
)
from trainer.megatron.replay import MaskedRouterReplay, RouterReplayAction, TopKRouter

REPLAY_BACKWARD = RouterReplayAction.REPLAY_BACKWARD

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Three layers, the middle one dense: columns of rows are layers 0 and 2."""
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", dense_layers=(1,), std=0.3)


@pytest.fixture
def worker(moe):
    """A worker that replays. Megatron's groups belong to the process: there is one at a time."""
    with started(trainer_config(moe)) as worker:
        yield worker


def test_routers_are_those_of_the_moe_layers_when_a_layer_is_dense(worker):
    assert [router.layer_number for router in worker.model.replay.routers] == [1, 3]
    assert worker.model.replay.columns == (slice(0, 2),)


@pytest.mark.case(31)
def test_replay_changes_nothing_when_the_rows_are_the_trainers_own(moe):
    batch = random_batch(layers=(0, 2))
    with started(trainer_config(moe, replay=False)) as native:
        expected = native.train_on(batch, 1)
        expected_gradients = gradients(native)
    with started(trainer_config(moe)) as replaying:
        own = replace(batch, routed_experts=native_rows(replaying, batch))
        result = replaying.train_on(own, 1)
        result_gradients = gradients(replaying)
        replaying.train_on(batch, 2)
        control = gradients(replaying)
    for key in ("loss", "grad_norm", "entropy"):
        assert result.metrics[key] == expected.metrics[key]
    assert not differing(result_gradients, expected_gradients)
    assert not any(torch.equal(control[name], g) for name, g in expected_gradients.items())


@pytest.mark.case(35)
def test_log_probs_stay_when_experts_of_a_row_change_places(worker):
    batch = random_batch(layers=(0, 2))
    expected = log_probs_of(worker, batch)
    turned = replace(batch, routed_experts=np.ascontiguousarray(batch.routed_experts[..., ::-1]))
    assert (turned.routed_experts != batch.routed_experts).all()
    np.testing.assert_allclose(log_probs_of(worker, turned), expected, atol=1e-6)
    # Control: the same places with another expert in them.
    moved = replace(batch, routed_experts=(batch.routed_experts + 1) % 8)
    assert np.abs(log_probs_of(worker, moved) - expected).mean() > 0.01


@pytest.mark.case(37)
def test_tokens_route_natively_when_their_rows_are_invalid(worker):
    batch = random_batch(layers=(0, 2))
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


@pytest.mark.real
@pytest.mark.case(32)
def test_result_is_the_same_when_activations_are_recomputed(moe):
    batch = random_batch(layers=(0, 2))
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
        torch.testing.assert_close(results[recompute][1], results["none"][1], atol=1e-7, rtol=1e-5)


@pytest.mark.case(32)
@pytest.mark.parametrize("wrong", [None, RouterReplayAction.REPLAY_FORWARD])
def test_step_is_refused_when_the_backward_pass_has_the_wrong_action(moe, monkeypatch, wrong):
    """Megatron then routes the recomputation natively, or by the last micro-batch's rows, without a word."""
    with started(trainer_config(moe, recompute="full", micro_batch_tokens=40)) as worker:
        before = weights(worker)
        honest = MaskedRouterReplay.set_router_replay_action
        monkeypatch.setattr(
            MaskedRouterReplay,
            "set_router_replay_action",
            lambda self, action: honest(self, wrong if action is REPLAY_BACKWARD else action),
        )
        with pytest.raises(AlignmentError, match=r"left over|without a replay target"):
            worker.train_on(random_batch(layers=(0, 2)), 1)
        assert not differing(weights(worker), before)


@pytest.mark.case(38)
def test_reference_pass_routes_natively_when_actors_replay_around_it(moe):
    batch = random_batch(layers=(0, 2))
    with started(trainer_config(moe, replay=False)) as worker:
        native = log_probs_of(worker, batch)
    config = trainer_config(moe, recompute="full", micro_batch_tokens=40)
    with started(config) as worker:
        worker.train_on(batch, 1)
        expected = gradients(worker)
    with started(config) as worker:
        placed = place(worker, batch)
        replayed = worker.compute_old_log_probs(placed, batch.num_tokens)[0]
        reference = [replaced(p, inputs=p.inputs._replace(routing=None)) for p in placed]
        np.testing.assert_allclose(
            worker.compute_old_log_probs(reference, batch.num_tokens)[0], native, atol=1e-5
        )
        np.testing.assert_array_equal(worker.compute_old_log_probs(placed, batch.num_tokens)[0], replayed)
        assert np.abs(replayed - native).mean() > 0.01
        worker.train_on(batch, 1)
        assert not differing(gradients(worker), expected)


@pytest.mark.case(48)
def test_replay_is_refused_when_the_model_is_dense(tmp_path):
    path = build_tiny_qwen3(tmp_path / "dense")
    for replay in ("r2", "r3"):
        with pytest.raises(ConfigError, match=r"no experts: set routing.replay=off"):
            with started(trainer_config(path, replay=replay)):
                pass
    with started(trainer_config(path, replay="off")) as worker:
        assert worker.model.replay is None
