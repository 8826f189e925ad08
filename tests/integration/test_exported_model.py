"""What users do in `.venv` with an exported model: in an interpreter of its own, without this project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.cli.main import main
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config

pytestmark = [pytest.mark.real, pytest.mark.megatron]

NOTEBOOK = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
question = [{"role": "user", "content": "What is 17 + 25?"}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
ids = model.generate(**prompt, do_sample=False, min_new_tokens=8, max_new_tokens=8)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    folder, num_labels=1, pad_token_id=tokenizer.pad_token_id
)
with torch.no_grad():
    score = reward_model(**prompt).logits
print(json.dumps({
    "question": tokenizer.decode(prompt["input_ids"][0]),
    "new_tokens": ids.shape[1] - prompt["input_ids"].shape[1],
    "text": tokenizer.decode(ids[0]),
    "score": list(score.shape),
}))
"""


def test_an_exported_model_generates_in_a_fresh_interpreter(calculator: Path, tmp_path: Path) -> None:
    with started(trainer_config(calculator / "model")) as worker:
        worker.train_on(random_batch(1), 1)
        worker.save_checkpoint(str(tmp_path / "run" / "checkpoints"), {})
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    done = subprocess.run(
        [sys.executable, "-I", "-c", NOTEBOOK, str(tmp_path / "exported")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert "What is 17 + 25?" in said["question"]
    assert said["text"].startswith(said["question"])
    assert said["new_tokens"] == 8
    assert said["score"] == [1, 1]
