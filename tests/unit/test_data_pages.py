"""docs/guide/own-task.md: the examples of datasets and rewards work as the page describes."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from agent_loops.rewards_code import code_tests
from async_rl.config import DataConfig, load_config
from async_rl.data import example_files
from async_rl.data.dataset import load_tasks
from async_rl.errors import ConfigError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.rewards.http_rewards import request_of
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.run.preflight import check_config
from async_rl.runtime import yaml12
from tests.support.pages import blocks
from tests.support.reward_functions import make_completion
from tests.support.run_config import config_of, write_run
from tests.support.scripted_session import make_task

PAGE = "guide/own-task.md"
ROWS = [json.loads(block) for block in blocks(PAGE, "json", "## Datasets")]
CUSTOM = {"question": "?", "solution": {"final": "42"}, "uid": "a"}
TESTS = {"prompt": "Write add.", "tests": ["assert add(1, 1) == 2"]}


def merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {key: merged(base.get(key), value) for key, value in changes.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files lie that the pages name; the current one."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    plain, verl, slime = ROWS
    rows = {"gsm8k": plain, "verl": verl, "slime": slime, "custom": CUSTOM, "code": TESTS}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    bare = {key: value for key, value in verl.items() if key != "agent_name"}
    pq.write_table(pa.Table.from_pylist([bare]), tmp_path / "train.parquet")
    return tmp_path


@pytest.mark.parametrize(("name", "schema"), [("gsm8k", "plain"), ("verl", "verl"), ("slime", "slime")])
def test_a_row_of_the_page_is_a_task(folder: Path, name: str, schema: str) -> None:
    tasks = load_tasks(DataConfig(path=f"{name}.jsonl"))
    assert (tasks.datasets[0].schema, tasks[0].answer) == (schema, "42")
    assert tasks[0].messages == [{"role": "user", "content": "What is 17 + 25?"}]
    assert len(tasks[0].tools) == int(schema == "slime")
    assert tasks[0].metadata.get("level") == (None if schema == "verl" else "easy")


class OnHub:
    """GSM8K, as the package `datasets` opens it."""

    def iter(self, batch_size: int) -> list[pa.Table]:
        return [pa.table({"question": ["What is 17 + 25?"], "answer": ["17 + 25 = 42\n#### 42"]})]


@pytest.mark.parametrize("text", blocks(PAGE, "yaml", "## Datasets"))
def test_a_config_of_the_page_passes_all_checks(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_files, "open_dataset", lambda *_: OnHub())
    base, changes = yaml.safe_load((folder / "run.yaml").read_text()), yaml12.load(text)
    del base["data"]["path"]
    (folder / "run.yaml").write_text(yaml.safe_dump(merged(base, changes)))
    found = check_config(load_config(folder / "run.yaml"))
    said = "\n".join(found)
    assert [line for line in found if line.startswith("data: ")]
    for dataset in changes["data"].get("datasets", ()):
        assert dataset.get("name", dataset["path"].removesuffix(".jsonl")) in said
    for dataset in changes["data"].get("validation", ()):
        name = dataset.get("name", dataset["path"].removesuffix(".jsonl"))
        assert f"validation: {name}: 1 plain examples" in said
    for name in changes.get("rollout", {}).get("agent_loops", ()):
        assert name != "tool_agent" or "agent loop: tool_agent, of 1 tasks" in said


def test_bad_rows_are_said_as_on_the_page(folder: Path) -> None:
    good = json.dumps({"id": "a", "messages": "x"})
    other = json.dumps({"question": "1 + 1?", "answer": "2"})
    (folder / "bad.jsonl").write_text("\n".join([good, other, "{", json.dumps({"messages": "y"}), good]))
    with pytest.raises(ConfigError) as raised:
        load_tasks(DataConfig(path="bad.jsonl"))
    (shown,) = (block for block in blocks(PAGE, "", "## Datasets") if "malformed examples" in block)
    assert f"async-rl: {raised.value}\n" == shown


# -- Rewards -------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the page in the files that it names."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUDGE_TOKEN", "t")
    name = ""
    for block in blocks(PAGE, "python", "## Rewards"):
        if block.startswith("# "):
            name = block.splitlines()[0].removeprefix("# ")
        with (tmp_path / name).open("a") as file:
            file.write(block + "\n")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    importlib.invalidate_caches()


def rewards_of(**rollout: Any) -> Rewards:
    return Rewards(config_of(**rollout), decode=str, metrics=Metrics(), clock=time.monotonic)


@pytest.mark.parametrize("text", blocks(PAGE, "yaml", "## Rewards"))
async def test_a_config_of_the_page_loads_its_rewards(modules: None, text: str) -> None:
    rollout = yaml12.load(text)["rollout"]
    rewards = rewards_of(**rollout)
    assert rewards.name_for(make_task()) == rollout["reward"]
    await rewards.close()


@pytest.mark.parametrize(
    ("path", "args", "parts"),
    [
        ("my_rewards:is_right", {}, {"reward": 1.0}),
        ("my_rewards:with_parts", {}, {"reward": 1.0, "length": 8.0}),
        ("my_rewards:scaled", {"scale": 0.5}, {"reward": 0.5}),
        ("verl_reward:compute_score", {}, {"reward": 1.0, "score": 1.0, "acc": 1.0}),
        ("slime_reward:rm", {}, {"reward": 1.0}),
    ],
)
async def test_a_function_of_the_page_rewards_the_right_answer(
    modules: None, path: str, args: dict[str, Any], parts: dict[str, float]
) -> None:
    rewards = rewards_of(reward="r", rewards={"r": {"function": path, "args": args}})
    assert await rewards.score_completion(make_task(answer="42"), make_completion("it is 42")) == parts
    assert (await rewards.score_completion(make_task(answer="43"), make_completion("42")))["reward"] == (
        1.0 if "parts" in path else 0.0
    )


async def test_the_groups_function_of_the_page_compares(modules: None) -> None:
    rewards = rewards_of(reward="my_rewards:longest_is_best")
    scores = await rewards.score_group(make_task(), [make_completion("a"), make_completion("abc")])
    assert scores == [{"reward": 0.0}, {"reward": 1.0}]


def test_a_request_is_what_the_page_says() -> None:
    shown = json.loads(blocks(PAGE, "json", "## Rewards")[0])
    completion = make_completion("x")
    assert list(request_of(make_task(), [completion], ["x"], group=False)) == list(
        {"task_id": 0, "prompt": 0, "label": 0, "data_source": 0, "metadata": 0} | shown
    )
    assert shown.keys() == request_of(make_task(), [completion], ["x"], group=False).keys()


@pytest.mark.real_time
@pytest.mark.needs("namespaces")
async def test_the_programs_tests_of_the_page_pass() -> None:
    for line in blocks(PAGE, "json", "## Rewards")[1].splitlines():
        row = json.loads(line)
        program = "def add(a, b):\n    return a + b\n"
        if "print" in row["prompt"]:
            program = "print(sum(map(int, input().split())))"
        scores = await code_tests(make_task(answer=row["answer"]), make_completion(program), wall_s=30)
        assert scores == {"reward": 1.0, "passed": 1.0}
