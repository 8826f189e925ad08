"""The quickstart's model and data; the `calculator` fixture builds them as `make quickstart` does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from agent_loops.calculator import calculator as evaluate
from async_rl.config import DataConfig, load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import load_tasks
from async_rl.sft.examples import load_conversations

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"


def test_model_is_the_same_bytes_when_it_is_built_again(calculator: Path, tmp_path: Path):
    subprocess.run(
        [sys.executable, EXAMPLE / "make_model.py", tmp_path], check=True, stdout=subprocess.DEVNULL
    )
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (calculator / "model" / name).read_bytes(), name


def test_tasks_have_right_answers(calculator: Path):
    tasks = load_tasks(DataConfig(path=str(calculator / "data" / "tasks.jsonl")))
    assert len(tasks) >= 1000
    assert all(task.answer == evaluate(task.metadata["expression"]) for task in tasks)
    assert all(task.metadata["expression"] in task.messages[0]["content"] for task in tasks)


def test_about_a_third_of_the_warm_start_calls_the_tool_and_none_of_it_is_a_task(calculator: Path):
    rows = [json.loads(line) for line in (calculator / "data" / "sft.jsonl").read_text().splitlines()]
    assert 0.3 < np.mean(["tool_calls" in row["messages"][1] for row in rows]) < 0.36
    tasks = load_tasks(DataConfig(path=str(calculator / "data" / "tasks.jsonl")))
    asked = {task.messages[0]["content"] for task in tasks}
    assert not asked & {row["messages"][0]["content"] for row in rows}


def test_trajectory_is_short_enough_for_the_examples_config(calculator: Path, tmp_path: Path):
    config, settings = load_config(EXAMPLE / "config.yaml"), load_config(EXAMPLE / "sft.yaml").sft
    some = tmp_path / "sft.jsonl"
    lines = (calculator / "data" / "sft.jsonl").read_text().splitlines(keepends=True)
    some.write_text("".join(lines[:500]))
    rows, _ = load_conversations(str(some), "sft.path", settings, load_chat_format(calculator / "model"))
    assert max(len(row.token_ids) for row in rows) < config.rollout.max_context_tokens
    assert 25 <= max(int(row.loss_mask.sum()) for row in rows) <= 40


def test_the_warm_start_writes_what_the_run_begins_with():
    warm, run = load_config(EXAMPLE / "sft.yaml"), load_config(EXAMPLE / "config.yaml")
    assert warm.sft.out == run.model.path
