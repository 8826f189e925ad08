"""The parts of the rollout KL on real Megatron-Core: each injection moves its own part."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    log_probs_of,
    native_rows,
    place,
    started,
    trainer_config,
    weights,
)
from trainer import logprob_mismatch
from trainer.megatron.packing import make_targets

pytestmark = [pytest.mark.real, pytest.mark.megatron]

TINY = 1e-9
"""Of half a mean square, nats: float32 log-probs of the same pass in other micro-batches."""


def with_probe(two_layers, every=1, **trainer):
    config = trainer_config(two_layers, **trainer)
    return config | {"routing": config["routing"] | {"probe_every": every}}


def sampled_by(worker, batch):
    """The batch with the log-probs that an engine of these weights, routed by its rows, would report."""
    at_prediction = log_probs_of(worker, batch)
    log_probs = np.zeros(batch.num_tokens, np.float32)
    log_probs[1:] = at_prediction[:-1]
    return msgspec.structs.replace(batch, rollout_log_probs=np.where(batch.loss_mask, log_probs, 0))


def parts(worker, batch):
    """As `train_on` measures them, without its step."""
    wanted = make_targets(batch)
    start, placed = worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)
    found = logprob_mismatch.measure_mismatch(wanted, start, 2.0) | worker.probe_routing(
        placed, wanted, start, 1
    )
    return {name: found[name] for name in ("kl_mismatch", "kl_staleness", "kl_routing")}


def test_each_injection_moves_its_own_part_only(two_layers):
    with started(with_probe(two_layers, micro_batch_tokens=10_000)) as worker:
        plain = random_batch(layers=2, lengths=(60,) * 8)
        own = msgspec.structs.replace(plain, routed_experts=native_rows(worker, plain))
        honest = sampled_by(worker, own)
        assert all(abs(value) < TINY for value in parts(worker, honest).values())

        noise = np.random.default_rng(0).normal(0, 0.1, plain.num_tokens).astype(np.float32)
        noisy = msgspec.structs.replace(honest, rollout_log_probs=honest.rollout_log_probs + noise)
        found = parts(worker, noisy)
        assert found["kl_mismatch"] == pytest.approx(0.005, rel=0.4)
        assert abs(found["kl_staleness"]) < 0.002
        # Both passes are compared with the same noise, which their difference does not have.
        assert abs(found["kl_routing"]) < 1e-5

        # An engine that chooses other experts than the trainer would, and says so.
        elsewhere = sampled_by(worker, plain)
        found = parts(worker, elsewhere)
        assert found["kl_routing"] > 1e-3
        assert abs(found["kl_mismatch"]) < TINY
        assert abs(found["kl_staleness"]) < TINY

        # Rows that are not those of the engine: replay makes it worse, and the mismatch is real.
        found = parts(worker, msgspec.structs.replace(honest, routed_experts=plain.routed_experts))
        assert found["kl_routing"] < -1e-3
        assert found["kl_mismatch"] == pytest.approx(-found["kl_routing"], rel=1e-3)

        # Newer weights than those that sampled tokens of lag 1 and more.
        worker.train_on(honest, 1)
        fresh = sampled_by(worker, msgspec.structs.replace(own, routed_experts=native_rows(worker, own)))
        older = (honest.weight_versions < honest.trainer_version) & honest.loss_mask
        stale = np.where(older, honest.rollout_log_probs, fresh.rollout_log_probs)
        found = parts(worker, msgspec.structs.replace(fresh, rollout_log_probs=stale))
        assert found["kl_staleness"] > 1e-6
        assert abs(found["kl_mismatch"]) < TINY
        assert abs(found["kl_routing"]) < TINY


def test_a_probe_changes_nothing_but_what_is_reported(two_layers):
    results = []
    for every in (0, 2):
        with started(with_probe(two_layers, every, loss={"old_log_probs": "rollout"})) as worker:
            found = [worker.train_on(random_batch(step, layers=2), step).metrics for step in (1, 2)]
            results.append((found, weights(worker)))
    (without, expected), (probed, actual) = results
    assert not differing(actual, expected)
    assert "kl_routing" not in without[1]
    assert "kl_routing" not in probed[0]
    assert 0 < probed[1]["routing_probe_tokens"] < probed[1]["tokens_lag0"]
    assert np.isfinite(probed[1]["kl_routing"])
