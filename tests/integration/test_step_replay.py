"""A captured step is trained once more on real Megatron-Core: bit for bit, or within rounding."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.cli.main import main
from async_rl.cli.price import price
from async_rl.cli.replay_step import ReplayDiffers, replay_step
from async_rl.config import Config, parse_config
from async_rl.config.reference import resolved_yaml
from async_rl.run.captures import Captures, write_capture
from async_rl.sft.sft_ranks import LocalRank
from async_rl.store.frames import read_trajectories
from async_rl.store.kept_batches import load_batch, load_result
from async_rl.trainer_protocol import LagMeasurement
from async_rl.types import TakenBatch
from tests.support.stored_batches import store_batch
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config

pytestmark = pytest.mark.megatron


class ReplayingRank(LocalRank):
    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        return self._worker.read_batch(batch)

    async def measure_lags(self, batch: TakenBatch) -> LagMeasurement:
        return self._worker.measure_lags(batch)


class RankWithAnotherRow(ReplayingRank):
    """Reads another expert in one row of the first trajectory, whose group has no advantages."""

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        flaws = await super().read_batch(batch)
        rows = self._worker._read[1].routed_experts
        rows[5] = (rows[5] + 1) % 8
        return flaws


@asynccontextmanager
async def in_process(
    config: Config, folder: Path, kind: type[ReplayingRank] = ReplayingRank
) -> AsyncIterator[LocalRank]:
    rank = kind(config)
    try:
        yield rank
    finally:
        await rank.close()


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Three steps of two updates with routing replayed, a checkpoint after the first."""
    folder = tmp_path_factory.mktemp("run")
    model = build_tiny_qwen3_moe(folder / "moe", num_layers=2)
    tree = trainer_config(model, updates_per_batch=2, loss={"check_old_log_probs_every": 2})
    config = parse_config(tree)
    captures = Captures(config, folder, 0)
    with started(tree) as worker:
        for step in (1, 2, 3):
            rewards = np.array([1.0, 1.0, 0.2, 1.3])  # the first group has no advantages
            lengths = (13, 7, 30, 19)
            batch = random_batch(step, layers=2, lengths=lengths, rewards=rewards, trainer_version=step - 1)
            taken = store_batch(folder / f"spool{step}", batch)
            assert worker.read_batch(taken) == {}
            worker.train_step(captures.keep_batch(taken, step), step)
            for each in taken.trajectories:
                Path(each.path).unlink()
            if step == 1:
                worker.save_checkpoint(str(folder / "checkpoints"), {})
                worker.saved_checkpoint(wait=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    return write_capture(config, folder, 3, "test")


def test_a_step_is_repeated_bit_for_bit(capture, capsys):
    assert replay_step(capture, open_trainer=in_process) == 0
    out = capsys.readouterr().out
    assert "from the checkpoint of step 1" in out
    assert "step 2: loss" in out
    assert "bit for bit" in out
    assert "step 1: loss" not in out


def test_a_captured_step_is_priced_at_the_weights_before_it(capture, capsys):
    assert price(capture, as_json=True, open_trainer=in_process) == 0
    found = json.loads(capsys.readouterr().out)
    batch = read_trajectories(load_batch(capture / "batches" / "step_00000003"))
    ages = (batch.trainer_version - batch.weight_versions)[batch.loss_mask]
    assert [(each["lag"], each["tokens"]) for each in found["lags"]] == [
        (lag, int((ages == lag).sum())) for lag in np.unique(ages)
    ]
    assert all(each["norm"] > 0 for each in found["lags"])
    assert found["bounds"] == [], "there are no steps to take speeds from"
    # The mean KL is of the weights before the step, which differ from those at the start.
    kl = sum(each["kl_nats"] * each["tokens"] for each in found["lags"]) / len(ages)
    metrics = load_result(capture / "batches" / "step_00000003").metrics
    # k3 is the mean of exp(d) - 1 - d.
    assert kl == pytest.approx(metrics["importance_ratio_mean"] - 1 - metrics["log_prob_diff"], rel=1e-4)
    assert replay_step(capture, open_trainer=in_process) == 0, "pricing has changed the capture"


def test_other_micro_batches_give_the_step_within_rounding(capture, capsys):
    assert replay_step(capture, ["trainer.micro_batch_tokens=1"], open_trainer=in_process) == 0
    assert "reproduced with other settings" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        ["trainer.num_ranks=2"],
        ["trainer.num_ranks=2", "trainer.layout.tp=2", "trainer.layout.etp=2"],
        ["trainer.num_ranks=2", "trainer.layout.pp=2"],
    ],
    ids=["dp2", "tp2", "pp2"],
)
def test_another_layout_gives_the_step_within_rounding(capture, capsys, tmp_path, layout):
    assert main(["replay-step", str(capture), *layout, "--json", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {(row["step"], row["figure"]) for row in rows} >= {
        (step, figure) for step in (2, 3) for figure in ("loss", "grad_norm")
    }
    for row in rows:
        assert row["replayed"] == pytest.approx(row["captured"], rel=1e-5, abs=1e-5), row
    if "trainer.layout.pp=2" not in layout:  # stages divide layers, and change no sum
        assert any(row["replayed"] != row["captured"] for row in rows), "the layout of the run"
    assert len(list((tmp_path / "logs").glob("*trainer*"))) >= 2


def test_another_loss_is_not_the_step_of_the_run(capture):
    with pytest.raises(ReplayDiffers, match="more than 1e-05 apart"):
        replay_step(capture, ["trainer.loss.advantages=dr_grpo"], open_trainer=in_process)


def test_one_changed_reward_is_noticed(capture, monkeypatch):
    """The control: a replay of another batch has another loss."""
    from async_rl.cli import replay_step as module

    load = module.load_batch

    def changed(folder):
        batch = load(folder)
        first = replace(batch.trajectories[0], reward=(batch.trajectories[0].reward or 0.0) + 1.0)
        return replace(batch, trajectories=(first, *batch.trajectories[1:]))

    monkeypatch.setattr(module, "load_batch", changed)
    with pytest.raises(ReplayDiffers, match="expected equal"):
        replay_step(capture, open_trainer=in_process)


def test_one_changed_routing_row_is_noticed_although_its_group_has_no_advantages(capture):
    with pytest.raises(ReplayDiffers, match=r"log_prob_(abs_)?diff of step"):
        replay_step(capture, open_trainer=partial(in_process, kind=RankWithAnotherRow))
