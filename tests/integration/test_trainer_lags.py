"""What tokens of each lag give the trainer, on real Megatron-Core: the run's loss, any layout, no change."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import CorruptFrame
from async_rl.trainer_protocol import LagMeasurement
from tests.support.ranks import run_ranks
from tests.support.stored_batches import store_batch
from tests.support.tiny_model import build_tiny_deepseek_v3
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gradients,
    log_probs_of,
    started,
    trainer_config,
    training_state,
    trial,
    weights,
)

pytestmark = [pytest.mark.real, pytest.mark.megatron, pytest.mark.timeout(600)]

LENGTHS = (13, 7, 30, 19, 5, 22, 11, 9, 16, 24)

OVER_ANSWERS = {"objective": "gspo", "aggregate": "sequence_mean", "advantages": "dr_grpo"}

LAYOUTS = {"data": {}, "expert": {"ep": 2}, "tensor and expert": {"tp": 2, "ep": 2}, "pipeline": {"pp": 2}}


def batch_of(layers: int = 2, lags: int = 3):
    """Five groups of two, whose tokens have lags from 0 on; an engine near the trainer sampled them."""
    batch = random_batch(layers=layers, lengths=LENGTHS)
    versions = np.where(batch.loss_mask, 4 - np.arange(batch.num_tokens) % 7 % lags, -1)
    return msgspec.structs.replace(batch, weight_versions=versions.astype(np.int32))


def of_lag(batch, lag):
    """The batch in which only tokens of a lag are trained."""
    chosen = batch.loss_mask & (batch.trainer_version - batch.weight_versions == lag)
    return msgspec.structs.replace(batch, loss_mask=chosen)


def flat(worker) -> torch.Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients(worker).values()])


def total(products) -> float:
    return float(np.sum(products))


@pytest.mark.parametrize("loss", [{}, OVER_ANSWERS], ids=["tokens", "answers"])
def test_the_gradients_of_all_lags_add_up_to_that_of_the_step(two_layers, loss):
    config = trainer_config(two_layers, loss=loss)
    batch = batch_of(lags=2)
    with started(config) as worker:
        fresh, stale = worker.measure_lags_of(batch).lags
        norm = worker.train_on(batch, 1).metrics["grad_norm"]
    assert norm > 0.01
    together = total(fresh.with_itself) + 2 * total(stale.with_fresh) + total(stale.with_itself)
    assert math.sqrt(together) == pytest.approx(norm, rel=1e-4)


def test_each_lag_is_what_it_is_alone(two_layers):
    """With every token of the same weight, a lag's gradient has the direction of one of its tokens only."""
    config = trainer_config(two_layers, loss={"advantages": "dr_grpo"})
    batch = batch_of()
    with started(config) as worker:
        measured = worker.measure_lags_of(batch)
        alone, log_probs = [], np.zeros(batch.num_tokens, np.float32)
        log_probs[1:] = log_probs_of(worker, batch)[:-1]
        with trial(worker, config):
            for lag in range(3):
                worker.train_on(of_lag(batch, lag), 1)
                alone.append(flat(worker))
    assert [each.lag for each in measured.lags] == [0, 1, 2]
    fresh = measured.lags[0]
    for each, gradient in zip(measured.lags, alone, strict=True):
        cosine = total(each.with_fresh) / math.sqrt(total(each.with_itself) * total(fresh.with_itself))
        expected = torch.nn.functional.cosine_similarity(gradient, alone[0], dim=0)
        assert cosine == pytest.approx(float(expected), abs=1e-4)

        # Four parts: groups 0 and 4 are the first, then one group each.
        mask = of_lag(batch, each.lag).loss_mask
        part = (np.repeat(batch.group_index, LENGTHS) % 4)[mask]
        assert each.tokens == tuple(np.bincount(part))
        difference = (log_probs - batch.rollout_log_probs)[mask].astype(np.float64)
        ratio = np.exp(difference)
        assert each.weights == pytest.approx(np.bincount(part, ratio), rel=1e-4)
        assert each.squares == pytest.approx(np.bincount(part, ratio**2), rel=1e-4)
        assert each.kl == pytest.approx(np.bincount(part, ratio - 1 - difference), rel=1e-3)
    assert abs(total(measured.lags[1].with_fresh)) < 0.9 * math.sqrt(
        total(measured.lags[1].with_itself) * total(fresh.with_itself)
    ), "lags cannot be told apart here"


UNCORRECTED = {"importance": {"level": "off"}, "uncorrected": True}
EXACT = {"importance": {"level": "token", "high": 1e9}}


@pytest.mark.parametrize(
    "loss", [UNCORRECTED, {"importance": {"high": 1.01}}, {"old_log_probs": "rollout"}], ids=str
)
def test_the_exact_gradient_is_that_of_weights_that_are_not_cut(two_layers, loss):
    batch = batch_of()
    with started(trainer_config(two_layers, loss=loss)) as worker:
        measured = worker.measure_lags_of(batch)
        with trial(worker, trainer_config(two_layers, loss=EXACT)):
            expected = worker.measure_lags_of(batch)
            norm = worker.train_on(batch, 1).metrics["grad_norm"]
    assert norm > 0.01
    for each, exact in zip(measured.lags, expected.lags, strict=True):
        np.testing.assert_allclose(exact.with_exact, exact.with_itself, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(each.exact_with_itself, exact.with_itself, rtol=1e-4, atol=1e-9)
        cosine = total(each.with_exact) / math.sqrt(total(each.with_itself) * total(each.exact_with_itself))
        assert cosine < 0.9999


def test_tokens_of_unknown_lag_are_counted_apart(two_layers):
    batch = batch_of()
    unknown = np.zeros(batch.num_tokens, bool)
    unknown[4:9] = True
    with started(trainer_config(two_layers)) as worker:
        measured = worker.measure_lags_of(msgspec.structs.replace(batch, lag_unknown=unknown))
    assert measured.unknown_tokens == 5
    known = sum(sum(each.tokens) for each in measured.lags)
    assert known == batch.loss_mask.sum() - 5


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_measuring_changes_nothing(tmp_path, replay):
    """Neither weights, moments nor the bias and counters of routers; the next step is the same."""
    model = build_tiny_deepseek_v3(tmp_path / "model", num_layers=2)
    config = trainer_config(
        model,
        replay=replay,
        updates_per_batch=2,
        loss={"kl": {"coefficient": 0.1, "estimator": "k3"}},
    )
    batch = random_batch(layers=(1,), lengths=LENGTHS, experts=16, top_k=4, routing=replay == "r3")
    after = []
    for measures in (False, True):
        with started(config) as worker:
            worker.train_on(batch, 1)  # so that there are moments
            before = [each.clone() for each in training_state(worker)]
            buffers = [each.clone() for chunk in worker.model.chunks for each in chunk.module.buffers()]
            if measures:
                assert len(worker.measure_lags_of(batch).lags) == 3
            now = training_state(worker)
            assert len(now) == len(before)
            assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
            assert buffers
            again = [each for chunk in worker.model.chunks for each in chunk.module.buffers()]
            assert all(torch.equal(a, b) for a, b in zip(again, buffers, strict=True))
            assert worker.num_steps == 1
            worker.train_on(batch, 2)
            after.append(weights(worker))
    assert not differing(*after)


def measure_in_layouts(rank: int, model: Path, folder: str, names: list[str], ranks: int):
    """Measure a stored batch in some layouts, and return what this rank reports."""
    found = {}
    for name in names:
        config = trainer_config(
            model, num_ranks=ranks, layout=LAYOUTS[name] if ranks > 1 else {}, recompute="full"
        )
        meeting = Path(folder) / f"meeting {name} {ranks}"
        with started(config, rank=rank, meeting=meeting if ranks > 1 else None) as worker:
            taken = store_batch(Path(folder) / f"spool {name} {ranks} {rank}", batch_of())
            found[name] = msgspec.msgpack.encode(worker.measure_lags(taken))
    return found


def products(measured: LagMeasurement) -> np.ndarray:
    return np.array([[each.with_fresh, each.with_itself, each.with_exact] for each in measured.lags])


def test_two_ranks_measure_what_one_does(two_layers, tmp_path):
    (alone,) = run_ranks(measure_in_layouts, two_layers, str(tmp_path), ["data"], 1, ranks=1)
    expected = msgspec.msgpack.decode(alone["data"], type=LagMeasurement)
    ranks = run_ranks(measure_in_layouts, two_layers, str(tmp_path), list(LAYOUTS), 2)
    scale = np.abs(products(expected)).max()
    for name in LAYOUTS:
        first, second = (msgspec.msgpack.decode(rank[name], type=LagMeasurement) for rank in ranks)
        assert first == second, name
        assert [each.tokens for each in first.lags] == [each.tokens for each in expected.lags], name
        np.testing.assert_allclose(products(first), products(expected), atol=1e-5 * scale, err_msg=name)
        for one, other in zip(first.lags, expected.lags, strict=True):
            assert one.weights == pytest.approx(other.weights, rel=1e-5), name
            assert one.kl == pytest.approx(other.kl, rel=1e-4), name


def test_a_damaged_frame_is_an_error(two_layers, tmp_path):
    taken = store_batch(tmp_path / "spool", batch_of())
    path = Path(taken.trajectories[3].path)
    path.write_bytes(path.read_bytes()[:-9])
    with started(trainer_config(two_layers)) as worker, pytest.raises(CorruptFrame, match="cut short"):
        worker.measure_lags(taken)
