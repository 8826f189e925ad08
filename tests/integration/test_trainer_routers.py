"""What replay does inside routers: gate weights, tokens that do not count, and whose router it is."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.errors import AlignmentError
from tests.support.bare_routers import bare_adapter, bare_config, top_k
from tests.support.tiny_model import build_tiny_deepseek_v3
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gradients,
    log_probs_of,
    place,
    started,
    trainer_config,
    weights,
)
from trainer.megatron import model as megatron_model
from trainer.megatron.replay import (
    MaskedRouterReplay,
    ReplayRows,
    RouterReplay,
    RouterReplayAction,
    TopKRouter,
)

pytestmark = [pytest.mark.real, pytest.mark.megatron]

EXPERTS, TOP_K = 16, 4
MOE_LAYERS = (1, 2)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A dense layer, then two with a shared expert, sigmoid scores, a bias that selects, and groups."""
    return build_tiny_deepseek_v3(tmp_path_factory.mktemp("models") / "deepseek", std=0.3)


@pytest.fixture(autouse=True)
def no_routers_left():
    yield
    RouterReplay.clear_global_router_replay_instances()


def batch_of(seed=0, **fields):
    return random_batch(seed, layers=MOE_LAYERS, experts=EXPERTS, top_k=TOP_K, **fields)


def routers_of(worker):
    return [m for chunk in worker.model.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]


@pytest.fixture
def with_fields(monkeypatch):
    """Set fields of Megatron's config that no setting of the trainer reaches."""
    plain = megatron_model.transformer_config
    return lambda **fields: monkeypatch.setattr(
        megatron_model, "transformer_config", lambda *a, **k: plain(*a, **k) | fields
    )


@pytest.fixture
def padded(monkeypatch):
    """Pad every trajectory to a multiple of 8, as several ranks would."""
    return lambda: monkeypatch.setattr(megatron_model.MegatronModel, "alignment", 8)


@pytest.fixture
def counting_padding(monkeypatch):
    """The control: lets tokens count that should not."""
    return lambda: monkeypatch.setattr(
        megatron_model, "padding_mask_for", lambda excluded, **_: torch.zeros_like(excluded)
    )


# -- gate weights


GATES = {
    "softmax after top-k": {"score_function": "softmax"},
    "softmax before top-k": {"score_function": "softmax", "use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid with bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-2, 2, EXPERTS)},
    "sigmoid with bias in groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(2, -2, EXPERTS),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
}


def dense_gates(logits, ids, score_function, use_pre_softmax=False, scaling_factor=1.0, **_):
    """Gates of given experts, `[tokens, experts]`; a bias only ever selects."""
    if score_function == "sigmoid":
        scores = logits.sigmoid().gather(1, ids)
        gates = scores / scores.sum(-1, keepdim=True)
    elif use_pre_softmax:
        gates = logits.softmax(-1).gather(1, ids)
    else:
        gates = logits.gather(1, ids).softmax(-1)
    return torch.zeros_like(logits).scatter(1, ids, gates * scaling_factor)


@pytest.mark.case(34)
@pytest.mark.parametrize("kind", GATES)
def test_gates_and_gradients_are_those_of_a_dense_gather_when_experts_are_replayed(kind):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    torch.manual_seed(0)
    logits = torch.randn(9, EXPERTS, requires_grad=True)
    reference = logits.detach().clone().requires_grad_()
    upstream = torch.randn(9, EXPERTS)
    native, _ = topk_routing_with_score_function(logits, TOP_K, **GATES[kind])
    # The experts that the router itself thinks least of.
    ids = native.detach().masked_fill(native == 0, -1).argsort(dim=1)[:, :TOP_K]
    assert not (native.gather(1, ids) > 0).any()
    replay = MaskedRouterReplay(1)
    replay.set_target_indices(ids.to(torch.uint8))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    gates, taken = topk_routing_with_score_function(logits, TOP_K, router_replay=replay, **GATES[kind])
    expected = dense_gates(reference, ids, **GATES[kind])
    assert (taken == (expected > 0)).all()
    torch.testing.assert_close(gates, expected, atol=1e-6, rtol=1e-6)
    (gates * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad, atol=1e-6, rtol=1e-6)
    assert (logits.grad.gather(1, ids).abs() > 1e-6).all()
    assert (gates - native).abs().max() > 0.1  # control: the router's own choice has other gates


@pytest.mark.case(34)
def test_router_learns_of_replayed_experts_when_it_would_not_have_taken_them(deepseek):
    batch = batch_of()
    rows = batch.routed_experts.copy()
    rows[:] = (12, 13, 14, 15)
    with started(trainer_config(deepseek)) as worker:
        worker.train_on(replace(batch, routed_experts=rows), 1)
        for router in routers_of(worker):
            norms = router.weight.main_grad.norm(dim=1)
            assert (norms[12:] > 1e-6).all()
            assert (norms[:12] == 0).all()  # so what the router would have taken did not count


# -- tokens that do not count


def counters(worker, batch):
    """Tokens of each expert that each router counted in a forward and backward pass, `[layers, experts]`."""
    config = worker.model.config
    counted, finalize = [], config.finalize_model_grads_func

    def look(*args, **kwargs):  # after all passes, before Megatron uses the counters and forgets them
        counted.append(torch.stack([r.local_tokens_per_expert for r in routers_of(worker)]).clone())
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = look
    placed = place(worker, batch)
    if worker.config.routing.replay == "r2":
        _, placed = worker.compute_old_log_probs(placed, batch.num_tokens)
    worker.model.run_schedule([p.inputs for p in placed], lambda index, hidden: (hidden.sum(), 1, None))
    config.finalize_model_grads_func = finalize
    (result,) = counted
    return result.numpy()


def histogram(rows):
    """`[tokens, layers, K]` → `[layers, experts]`."""
    return np.stack([np.bincount(rows[:, c].ravel(), minlength=EXPERTS) for c in range(rows.shape[1])])


@pytest.mark.case(37, 39)
def test_counters_hold_the_replayed_experts_of_valid_tokens_when_padded(deepseek, padded, counting_padding):
    """Also under full recomputation each token counts once; invalid rows and padding count nowhere."""
    batch = batch_of()
    batch.routing_valid[40:60] = False
    padded()
    expected = histogram(batch.routed_experts[batch.routing_valid])
    with started(trainer_config(deepseek, micro_batch_tokens=40, recompute="full")) as worker:
        np.testing.assert_array_equal(counters(worker, batch), expected)
        counting_padding()
        assert (counters(worker, batch) > expected).any()


@pytest.mark.case(37)
@pytest.mark.parametrize("replay", ["off", "r2"])
def test_counters_hold_real_tokens_when_nothing_is_replayed(deepseek, padded, replay):
    batch = batch_of(routing=False)
    padded()
    with started(trainer_config(deepseek, replay=replay, micro_batch_tokens=40)) as worker:
        assert (counters(worker, batch).sum(1) == batch.num_tokens * TOP_K).all()


BALANCING = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}


@pytest.mark.case(37)
def test_balancing_losses_do_not_see_padding_when_they_are_on(
    deepseek, with_fields, padded, counting_padding
):
    batch = batch_of()
    config = trainer_config(deepseek, micro_batch_tokens=10_000)

    def gradient():
        with started(config) as worker:
            worker.train_on(batch, 1)
            return [router.weight.main_grad.clone() for router in routers_of(worker)]

    without = gradient()
    with_fields(**BALANCING)
    expected = gradient()
    padded()
    for actual, wanted, plain in zip(gradient(), expected, without, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-4)
        assert (wanted - plain).abs().max() > 1e-5  # the loss is there
    counting_padding()
    assert max((a - w).abs().max() for a, w in zip(gradient(), expected, strict=True)) > 1e-5


@pytest.mark.case(37)
def test_log_probs_do_not_depend_on_padding_when_rows_are_replayed(deepseek, padded):
    batch = batch_of()
    batch.routing_valid[40:60] = False
    batch.routed_experts[40:60] = 255  # never looked at
    with started(trainer_config(deepseek)) as worker:
        expected = log_probs_of(worker, batch)
        lengths = sum(p.inputs.token_ids.shape[1] for p in place(worker, batch))
    padded()
    with started(trainer_config(deepseek)) as worker:
        actual = log_probs_of(worker, batch)
        assert sum(p.inputs.token_ids.shape[1] for p in place(worker, batch)) > lengths
        metrics = worker.train_on(batch, 1).metrics
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()


@pytest.mark.case(39)
def test_experts_are_not_balanced_by_anything_but_the_reward_when_trained(deepseek, with_fields):
    """The policy of docs/design/routing-replay.md: no auxiliary loss, and an expert bias that stays."""
    batch = batch_of()

    def biases(worker):
        return {name: t for name, t in weights(worker).items() if name.endswith("e_score_correction_bias")}

    with started(trainer_config(deepseek)) as worker:
        assert not any(router.is_aux_loss_enabled() for router in routers_of(worker))
        before = biases(worker)
        worker.train_on(batch, 1)
        assert len(before) == 2
        assert not differing(biases(worker), before)
        # No reward differs, no gradient: nothing else pulls at the weights.
        flat = replace(batch, rewards=np.ones(batch.num_trajectories, np.float32))
        assert worker.train_on(flat, 2).metrics["grad_norm"] == 0
    with_fields(moe_router_bias_update_rate=0.01, **BALANCING)  # control
    with started(trainer_config(deepseek)) as worker:
        assert worker.train_on(flat, 1).metrics["grad_norm"] > 1e-4
        assert differing(biases(worker), before)


# -- whose router it is, and in which order tokens come


# -- recording (R2)


@pytest.mark.case(31)
def test_recorded_routing_gives_the_native_step_bit_for_bit(deepseek):
    batch = batch_of()
    config = {"recompute": "full", "micro_batch_tokens": 40}
    with started(trainer_config(deepseek, replay="off", **config)) as worker:
        expected, expected_gradients = worker.train_on(batch, 1).metrics, gradients(worker)
    # Rows of the batch are not looked at, be they right, wrong or missing.
    wrong = replace(batch, routed_experts=np.full_like(batch.routed_experts, 255))
    for given in (wrong, batch_of(routing=False)):
        with started(trainer_config(deepseek, replay="r2", **config)) as worker:
            result, result_gradients = worker.train_on(given, 1).metrics, gradients(worker)
        for key in ("loss", "grad_norm", "entropy", "old_log_prob_abs_diff"):
            assert result[key] == expected[key]
        assert not differing(result_gradients, expected_gradients)
    with started(trainer_config(deepseek, **config)) as worker:  # control: R3 does look
        worker.train_on(batch, 1)
        assert differing(gradients(worker), expected_gradients)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
@pytest.mark.parametrize("experts", [256, 300])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says that it is a prototype
def test_nothing_waits_for_the_device_when_recorded_and_replayed(monkeypatch, device, experts):
    adapter = bare_adapter(monkeypatch, bare_config(num_moe_experts=experts), device)
    scores = [torch.randn(6, experts, device=device) for _ in range(2)]
    others = [-s for s in scores]
    with torch.no_grad():
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:

            def forward(inputs):
                return [
                    r.get_replay_topk(s, 2, default_compute_topk=top_k)[1]
                    for r, s in zip(adapter.routers, inputs, strict=True)
                ]

            taken, rows = adapter.record_micro_batch(0, 6, lambda: forward(scores))
            known = torch.tensor([True] * 4 + [False] * 2)
            known = known.pin_memory() if device == "cuda" else known
            with adapter.guard_schedule(), adapter.replay_micro_batch(0, ReplayRows(rows.ids, known)):
                replayed = forward(others)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert rows.ids.dtype == (torch.uint8 if experts == 256 else torch.uint16)
    assert rows.ids.device.type == "cpu"
    assert rows.ids.is_pinned() == (device == "cuda")
    for first, again, other in zip(taken, replayed, others, strict=True):
        assert torch.equal(first[:4], again[:4])
        assert torch.equal(again[4:], other[4:].topk(2).indices)


def test_recording_is_refused_when_a_router_was_not_called_once(monkeypatch):
    adapter = bare_adapter(monkeypatch, bare_config())
    scores = torch.randn(6, 300)

    def call(*routers, tokens=6):
        return lambda: [
            adapter.routers[r].get_replay_topk(scores[:tokens], 2, default_compute_topk=top_k)
            for r in routers
        ]

    with torch.no_grad():
        with pytest.raises(AlignmentError, match=r"layers \[5\] were not called"):
            adapter.record_micro_batch(0, 6, call(0))
        with pytest.raises(AlignmentError, match=r"layer 2: .* expected no call while recording"):
            adapter.record_micro_batch(0, 6, call(0, 0, 1))
        with pytest.raises(
            AlignmentError, match=r"chose \(5, 2\) experts, expected \(6, 2\) while recording"
        ):
            adapter.record_micro_batch(0, 6, call(0, 1, tokens=5))
        assert len(adapter.record_micro_batch(0, 6, call(0, 1))[0]) == 2
