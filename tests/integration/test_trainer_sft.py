"""Supervised steps on the trainer's own model: they depend on the conversations, not on how these are cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_rl.observability.sft_record import sft_record_log
from async_rl.sft.schedule import SftBatch, SftExample, batch_of
from async_rl.sft.sft_run import sft
from tests.support.ranks import run_ranks
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.trainers import gathered_gradients, trainer_config
from trainer.sft import SftWorker

pytestmark = [pytest.mark.real, pytest.mark.megatron]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "moe"
    path = build_tiny_qwen3_moe(folder, num_layers=2, vocab_size=320)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 2, "content": "<e>", "special": True, **dict.fromkeys(FLAGS, False)},
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"<u>": 0, "<e>": 2, "q": 3, "a": 4}, "unk_token": "<u>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<e>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def counting_rows(count: int, seed: int = 0) -> list[SftExample]:
    """After 5 comes 6, after 6 comes 7; what is masked out is noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        first, length = int(rng.integers(5, 50)), int(rng.integers(6, 14))
        ids = [*rng.integers(3, 96, 3).tolist(), *range(first, first + length)]
        mask = [False] * 4 + [True] * (length - 1)
        rows.append(SftExample(token_ids=np.array(ids, np.int32), loss_mask=np.array(mask)))
    return rows


def write_rows(path: Path, rows: list[SftExample]) -> Path:
    lines = ({"token_ids": r.token_ids.tolist(), "loss_mask": r.loss_mask.tolist()} for r in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fit(worker: SftWorker) -> dict:
    """A step and the loss after it; the gradients are those of the step."""
    worker.setup(None)
    batch = batch_of(counting_rows(7, seed=3), "a")
    first = worker.train_step(SftBatch(rows=batch, learning_rate=1e-2), 1)
    gradients = gathered_gradients(worker)
    after = worker.train_step(SftBatch(rows=batch, learning_rate=0.0, train=False), 1)
    worker.close()
    return {
        "losses": [first.metrics["loss"], after.metrics["loss"]],
        "norm": first.metrics["grad_norm"],
        "trained": [first.metrics["trained_tokens"], after.metrics["trained_tokens"]],
        "gradients": gradients,
    }


def run_rank(rank: int, model: Path, meeting: Path) -> dict:
    return fit(SftWorker(config_of(model, 32, num_ranks=2, layout={"ep": 2}), rank, 2, f"file://{meeting}"))


def config_of(model: Path, micro_batch_tokens: int, **trainer) -> dict:
    return trainer_config(
        model, replay=False, micro_batch_tokens=micro_batch_tokens, temperature=0.7, **trainer
    )


@pytest.fixture(scope="module")
def by_cut(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The same step in one micro-batch, in one for each conversation, and on two ranks."""
    whole, cut = (fit(SftWorker(config_of(moe, tokens), 0, 1, "")) for tokens in (4096, 1))
    first, second = run_ranks(run_rank, moe, tmp_path_factory.mktemp("ranks") / "meeting")
    return {"whole": whole, "cut": cut, "rank 0": first, "rank 1": second}


@pytest.mark.parametrize("name", ["cut", "rank 0", "rank 1"])
def test_a_step_is_the_same_however_it_is_cut_and_on_two_ranks(by_cut, name):
    whole, other = by_cut["whole"], by_cut[name]
    assert whole["losses"][1] < whole["losses"][0], "the step made it better"
    assert other["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert other["norm"] == pytest.approx(whole["norm"], rel=1e-4)
    assert (
        other["trained"] == whole["trained"] == [sum(r.loss_mask.sum() for r in counting_rows(7, seed=3))] * 2
    )
    assert set(other["gradients"]) == set(whole["gradients"])
    torch.testing.assert_close(other["gradients"], whole["gradients"], rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_trained_tokens_of_transformers(moe, by_cut):
    """An independent implementation: Hugging Face's model on each conversation by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    summed, tokens = 0.0, 0
    for row in counting_rows(7, seed=3):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        picked = log_probs.gather(-1, ids[1:, None])[:, 0]
        summed -= float(picked[torch.from_numpy(row.loss_mask[1:])].sum())
        tokens += int(row.loss_mask.sum())
    assert by_cut["whole"]["losses"][0] == pytest.approx(summed / tokens, rel=1e-4)


def test_the_command_trains_resumes_and_writes_a_folder_for_a_run(moe, tmp_path, capsys):
    data = write_rows(tmp_path / "data.jsonl", counting_rows(48))
    held_out = write_rows(tmp_path / "held_out.jsonl", counting_rows(8, seed=1))
    config = tmp_path / "sft.yaml"
    config.write_text(
        json.dumps(
            {
                "run": {"name": "warm", "dir": str(tmp_path / "runs")},
                "model": {"path": str(moe), "dtype": "float32"},
                "trainer": {"device": "cpu", "checkpoint_every": 4, "keep_checkpoints": 1},
                "sft": {
                    "path": str(data),
                    "validation": str(held_out),
                    "max_tokens": 64,
                    "batch_tokens": 128,
                    "epochs": 3,
                    "lr": 1e-2,
                    "warmup_steps": 2,
                    "out": str(tmp_path / "warm"),
                },
            }
        )
    )
    assert sft(config, ["sft.max_steps=4"]) == 0
    assert sft(config) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    records = sft_record_log(tmp_path / "runs" / "warm" / "metrics.jsonl").read()
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    assert records[-1].loss < records[0].loss / 2
    assert records[-1].validation_loss < records[3].validation_loss
    assert (tmp_path / "warm" / "chat_template.jinja").read_text() == TEMPLATE
    before, after = load_file(moe / "model.safetensors"), load_file(tmp_path / "warm" / "model.safetensors")
    assert set(before) == set(after)
    assert any(not np.array_equal(before[name], after[name]) for name in before)
