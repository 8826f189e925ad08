"""The warm start, through its command line."""

import json
import re

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.tiny_model import build_tiny_qwen3_moe
from trainer import sft

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore:::megatron")]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", num_layers=2)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_loss_falls_and_the_folder_is_complete_when_warm_started(moe, tmp_path, capsys):
    """After 5 comes 6, after 6 comes 7, …; what is masked out is noise."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(64):
        first, length = int(rng.integers(5, 50)), int(rng.integers(6, 14))
        ids = [*rng.integers(3, 96, 3).tolist(), *range(first, first + length)]
        rows.append({"token_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 1)})
    data, out = write_rows(tmp_path / "data.jsonl", rows), tmp_path / "out"
    arguments = [moe, data, out, "--steps", 40, "--batch-sequences", 16, "--lr", 5e-3, "--warmup", 5]
    assert sft.main([str(a) for a in arguments]) == 0
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] / 2
    assert (out / "chat_template.jinja").is_file()
    before, after = load_file(moe / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    assert any(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("second_line", "words"),
    [
        ('{"token_ids": [1, 2, 3], "loss_mask": [0, 1]}', "3 token_ids and 2 loss_mask"),
        ('{"token_ids": [1, 2, 3]}', "loss_mask"),
        ("nonsense", "expected token_ids"),
    ],
)
def test_file_and_line_are_named_when_a_row_is_malformed(moe, tmp_path, capsys, second_line, words):
    data = tmp_path / "data.jsonl"
    data.write_text('{"token_ids": [1, 2], "loss_mask": [0, 1]}\n' + second_line + "\n")
    assert sft.main([str(moe), str(data), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "data.jsonl:2" in message
    assert words in message


def test_every_row_comes_once_an_epoch_when_shuffled():
    batches = sft.shuffled(10, 4, seed=0)
    order = [i for _ in range(5) for i in next(batches)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
