"""Routing replay on Megatron-Core's real routers."""

import copy
from dataclasses import replace as replaced

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import AlignmentError, ConfigError
from tests.support.tiny_model import build_tiny_qwen3, build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    gradients,
    log_probs_of,
    native_rows,
    place,
    started,
    trainer_config,
    weights,
)
from trainer.megatron.replay import (
    MaskedRouterReplay,
    ReplayRows,
    RouterReplayAction,
    RouterReplayAdapter,
    TopKRouter,
    check_rows,
)

REPLAY_BACKWARD = RouterReplayAction.REPLAY_BACKWARD

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
    assert all(torch.equal(result_gradients[name], g) for name, g in expected_gradients.items())
    assert not any(torch.equal(control[name], g) for name, g in expected_gradients.items())


def test_log_probs_follow_the_rows_when_they_are_others(worker):
    batch = random_batch(layers=(0, 2))
    own = replace(batch, routed_experts=native_rows(worker, batch))
    assert np.abs(log_probs_of(worker, batch) - log_probs_of(worker, own)).mean() > 0.01


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


def test_each_layer_gets_its_own_column_when_rows_differ_by_layer(worker):
    seen = {}

    def watch(router, inputs, outputs):
        seen[router.layer_number] = outputs[1].clone()  # [tokens, experts] bool

    routers = [m for m in worker.model.chunks[0].modules() if isinstance(m, TopKRouter)]
    hooks = [router.register_forward_hook(watch) for router in routers]
    single = random_batch(layers=(0, 2), lengths=(24,), group_size=1)
    log_probs_of(worker, single)
    for hook in hooks:
        hook.remove()
    for column, layer in enumerate((1, 3)):
        chosen = np.sort(single.routed_experts[:-1, column], -1)
        np.testing.assert_array_equal(seen[layer].nonzero()[:, 1].view(-1, 2)[:-1].numpy(), chosen)


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
        for name, gradient in results["none"][1].items():
            torch.testing.assert_close(results[recompute][1][name], gradient, atol=1e-7, rtol=1e-5)


def rows_of(tokens, layers=2, value=0):
    """Rows of `tokens` tokens that all name the experts `value` and `value + 1`."""
    ids = torch.tensor([value, value + 1], dtype=torch.uint8).repeat(tokens, layers, 1)
    return ReplayRows(ids, None)


def call(router, tokens, top_k=2):
    """What Megatron's routing calls: returns the chosen experts."""
    scores = torch.randn(tokens, 8)
    return router.get_replay_topk(scores, top_k, default_compute_topk=lambda s, k, **_: s.topk(k))[1]


@pytest.mark.case(32)
def test_schedule_fails_when_a_target_is_left_for_the_backward_pass(worker):
    replay = worker.model.replay
    with pytest.raises(AlignmentError, match=r"after a schedule .* left over"), replay.guard_schedule():
        replay.routers[0].set_target_indices(torch.zeros(3, 2, dtype=torch.uint8), recomputed=True)
    with replay.guard_schedule():  # nothing leaks into the next one
        pass


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
        assert all(torch.equal(weights(worker)[name], tensor) for name, tensor in before.items())


@pytest.mark.case(33)
def test_router_refuses_when_its_target_is_missing_or_of_other_tokens(worker):
    replay = worker.model.replay
    (router, other) = replay.routers
    with pytest.raises(AlignmentError, match=r"sees 5 tokens .* target is \(4, 2\)"):
        with replay.replay_micro_batch(0, rows_of(4)):
            call(router, 5)
    with pytest.raises(AlignmentError, match=r"picks 3 experts, but its replay target is \(4, 2\)"):
        with replay.replay_micro_batch(0, rows_of(4)):
            call(router, 4, top_k=3)
    with pytest.raises(AlignmentError, match=r"sees 4 tokens .* target is \(0, 2\)"):
        with replay.replay_micro_batch(0, rows_of(0)):
            call(router, 4)
    with pytest.raises(AlignmentError, match=r"2 routers, but its rows are of 3 layers"):
        with replay.replay_micro_batch(0, rows_of(4, layers=3)):
            pass
    with pytest.raises(AlignmentError, match=r"layers \[3\] were not called"):
        with replay.replay_micro_batch(0, rows_of(4)):
            call(router, 4)
    with replay.guard_schedule(), replay.replay_micro_batch(0, rows_of(4, value=5)):
        for each in (router, other):
            assert call(each, 4).tolist() == [[5, 6]] * 4
            with pytest.raises(AlignmentError, match=r"without a replay target"):
                call(each, 4)


@pytest.mark.case(38)
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_reference_pass_routes_natively_when_actors_replay_around_it(moe, recompute):
    batch = random_batch(layers=(0, 2))
    with started(trainer_config(moe, replay=False)) as worker:
        native = log_probs_of(worker, batch)
    with started(trainer_config(moe, recompute=recompute, micro_batch_tokens=40)) as worker:
        worker.train_on(batch, 1)
        expected = gradients(worker)
    with started(trainer_config(moe, recompute=recompute, micro_batch_tokens=40)) as worker:
        placed = place(worker, batch)
        replayed = worker.compute_old_log_probs(placed, batch.num_tokens)[0]
        reference = [replaced(p, inputs=p.inputs._replace(routing=None)) for p in placed]
        np.testing.assert_allclose(
            worker.compute_old_log_probs(reference, batch.num_tokens)[0], native, atol=1e-5
        )
        np.testing.assert_array_equal(worker.compute_old_log_probs(placed, batch.num_tokens)[0], replayed)
        assert np.abs(replayed - native).mean() > 0.01
        worker.train_on(batch, 1)
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(worker).items())


def with_rows(change):
    batch = random_batch(layers=(0, 2))
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


WRONG_ROWS = [
    (_duplicate, "trajectory 2.*layer 2 names an expert twice: \\[3, 3\\]"),
    (_out_of_range, "trajectory 0 has expert id 8, expected below 8"),
    (_zero_layer, "trajectory 1 has only zeros in layer 2"),
    (_one_row_too_many, "trajectory 1 has 7 tokens and as many routing rows"),
    (lambda r, v, b: {"routed_experts": r[:, :1]}, "MoE layers"),
    (lambda r, v, b: {"routed_experts": r[:-1]}, "routing rows are"),
    (lambda r, v, b: {"routed_experts": r.astype(np.int32)}, "int32, expected uint8 or uint16"),
    (lambda r, v, b: {"num_experts": 16}, "16 experts, but the trainer's has 8"),
    (lambda r, v, b: {"moe_layers": (1, 2)}, r"of the layers \(1, 2\), but .* experts in \(0, 2\)"),
    (lambda r, v, b: {"moe_layers": ()}, r"of the layers \(\), but"),
    (lambda r, v, b: {"routed_experts": None, "routing_valid": None}, "carries no routing rows"),
]


@pytest.mark.case(33, 36)
def test_batch_is_refused_when_its_rows_are_wrong(worker):
    before = log_probs_of(worker, random_batch(layers=(0, 2)))
    for change, words in WRONG_ROWS:
        with pytest.raises(AlignmentError, match=words):
            worker.train_on(with_rows(change), 1)
    np.testing.assert_array_equal(log_probs_of(worker, random_batch(layers=(0, 2))), before)


@pytest.mark.parametrize(("tokens", "refused"), [(6, False), (64, False), (65, True)])
def test_rows_pass_when_a_top_1_trajectory_is_short_and_all_zero(worker, tokens, refused):
    config = copy.copy(worker.model.config)
    config.moe_router_topk = 1
    batch = random_batch(layers=(0, 2), lengths=(tokens,), top_k=1)
    batch.routed_experts[:] = 0
    if refused:
        with pytest.raises(AlignmentError, match=r"only zeros in layer 0"):
            check_rows(batch, config)
    else:
        check_rows(batch, config)


def test_id_255_is_an_expert_when_there_are_256(worker):
    config = copy.copy(worker.model.config)
    config.num_moe_experts = 256
    batch = replace(random_batch(layers=(0, 2)), num_experts=256)
    batch.routed_experts[3, 1] = (255, 0)
    check_rows(batch, config)


@pytest.mark.case(33)
def test_replay_is_refused_when_the_router_would_not_obey(worker):
    for field, value in (
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_enable_routing_replay", False),
    ):
        config = copy.copy(worker.model.config)
        setattr(config, field, value)
        with pytest.raises(ConfigError, match=field):
            RouterReplayAdapter([], config)


@pytest.mark.case(48)
def test_replay_is_refused_when_the_model_is_dense(tmp_path):
    path = build_tiny_qwen3(tmp_path / "dense")
    for replay in ("r2", "r3"):
        with pytest.raises(ConfigError, match=r"no experts: set routing.replay=off"):
            with started(trainer_config(path, replay=replay)):
                pass
    with started(trainer_config(path, replay="off")) as worker:
        assert worker.model.replay is None
