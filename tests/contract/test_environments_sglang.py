"""The environments of `examples/environments`, with their real packages, on a real SGLang server.

Each config is run by `async-rl rollout` in an environment that has the packages, with the tiny model's tokens
as actions. The model knows no task: what is tested is that observations, rewards and ends arrive.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.package_environments import python_with
from tests.support.sglang_world import SGLangWorld

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.long,
    pytest.mark.needs("pypi"),
    pytest.mark.timeout(900),  # the first test installs packages and starts the server
]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "environments"
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<pad>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
STOP = 'rollout.agent_loop_args.stop=["0", "1", "2", "3", "e"]'
"""Ends of an action: the tiny model hardly ever ends a turn by itself."""
START_S = 120


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with("environments")


@pytest.fixture(scope="module")
def model(sglang_world: SGLangWorld) -> Path:
    folder = sglang_world.weights[0]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def number_server(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the example's OpenEnv server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [python, "-m", "uvicorn", "examples.environments.number_server:app", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(server, url, log)
            yield url
        finally:
            server.terminate()
            server.wait()


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except URLError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def environment_of(python: Path, world: SGLangWorld) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ASYNC_RL_ENGINE_API_KEY": world.server.api_key,
        "ASYNC_RL_ENGINE_ADMIN_KEY": world.server.admin_key,
    }


def rolled_out(
    python: Path, world: SGLangWorld, example: str | Path, *overrides: str, number: int = 2
) -> list[dict[str, Any]]:
    """Trajectories of an example's config on the server."""
    settings = [
        f"model.path={world.weights[0]}",
        f"engine.urls=[{world.server.url}]",
        "rollout.num_workers=0",
        *overrides,
    ]
    command = [python, "-m", "async_rl.cli.main", "rollout", EXAMPLES / Path(example).with_suffix(".yaml")]
    done = subprocess.run(
        [*command, "--n", str(number), "--json", *settings],
        cwd=ROOT,
        env=environment_of(python, world),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def passages(trajectory: dict[str, Any], role: str) -> list[str]:
    return [each["text"] for each in trajectory["passages"] if each["role"] == role]


def turns_of(trajectory: dict[str, Any]) -> int:
    return len(passages(trajectory, "policy"))


def test_gymnasium_renders_its_lake_and_moves_as_the_policy_writes(
    python: Path, sglang_world: SGLangWorld, model: Path
) -> None:
    found = rolled_out(
        python, sglang_world, "gymnasium", STOP, "rollout.agent_loop_args.max_turns=8", number=8
    )
    assert len(found) == 8
    moved = 0
    for each in found:
        parts, turns = each["reward_parts"], turns_of(each)
        assert parts["steps"] == turns == each["tool_calls"]
        assert "[S]FFF\nFHFH\nFFFH\nHFFG" in passages(each, "prompt")[0]
        answers = passages(each, "user")
        assert len(answers) == turns - 1
        refused = sum("expected one of left, down, right, up" in text for text in answers)
        drawn = [text for text in answers if re.search(r"\[[SFHG]\]", text)]
        assert refused + len(drawn) == turns - 1
        moved += len(drawn)
        assert each["stop_reason"] in ("completed", "max_turns", "length")
        assert each["reward"] == parts["return"]
        assert each["trained_tokens"] == sum(p["tokens"] for p in each["passages"] if p["role"] == "policy")
    assert moved > 0


def test_openenv_plays_on_its_own_server(
    python: Path, sglang_world: SGLangWorld, model: Path, number_server: str
) -> None:
    url = f"rollout.agent_loop_args.url={number_server}"
    found = rolled_out(python, sglang_world, "openenv", STOP, url)
    assert len(found) == 2
    for each in found:
        assert "I think of a number from 1 to 100." in passages(each, "prompt")[0]
        answers = passages(each, "user")
        assert answers
        assert all(re.search("Write a number|higher|lower", text) for text in answers)
        assert each["stop_reason"] == "completed"
        assert each["reward_parts"]["steps"] == turns_of(each) == len(answers) + 1 <= 8


@pytest.mark.needs("namespaces")
def test_harbor_scores_what_the_policy_left(python: Path, sglang_world: SGLangWorld, model: Path) -> None:
    found = rolled_out(python, sglang_world, "harbor", STOP)
    assert {each["task_id"] for each in found} == {"word_count", "largest_file"}
    for each in found:
        assert "answer.txt" in passages(each, "prompt")[0]
        assert each["stop_reason"] == "completed"
        assert each["reward_parts"]["reward"] == 0.0
        assert each["error"] is None
    (listed,) = [each["reward_parts"] for each in found if each["task_id"] == "largest_file"]
    assert (listed["named"], listed["removed"]) == (0.0, 0.0)


def test_verifiers_plays_in_a_process_with_its_own_packages(
    python: Path, sglang_world: SGLangWorld, model: Path, tmp_path: Path
) -> None:
    with_verifiers = str(python_with("verifiers"))
    config, tasks = tmp_path / "config.yaml", tmp_path / "tasks.jsonl"
    config.write_text(
        (EXAMPLES / "verifiers.yaml").read_text().replace("/tmp/verifiers/bin/python", with_verifiers)
    )
    shutil.copy(EXAMPLES / "numbers_game.py", tmp_path)
    write = [python, "-m", "agent_loops.environment.verifiers", config, tasks, "--n", "2"]
    subprocess.run(write, cwd=ROOT, env=environment_of(python, sglang_world), check=True)
    found = rolled_out(
        python,
        sglang_world,
        config,
        f"data.path={tasks}",
        'rollout.agent_loop_args.sampling_args={stop: ["0", "1", "2", "3", "e"]}',
    )
    assert {each["task_id"] for each in found} == {"numbers-game-0", "numbers-game-1"}
    for each in found:
        assert "I think of a number from 1 to 100." in passages(each, "prompt")[0]
        answers = passages(each, "user")
        assert all(re.search("Write a number|higher|lower|Right", text) for text in answers)
        assert each["error"] is None
        assert turns_of(each) == len(answers) + 1 <= 8
        # The random model may begin with a stop string: an empty answer, which ends the episode, is no turn.
        is_cut = each["stop_reason"] == "max_turns"
        assert each["reward_parts"]["num_turns"] == turns_of(each) - (0 if is_cut else 1)
        assert turns_of(each) == 8 if is_cut else each["stop_reason"] == "completed"
        assert each["reward"] == each["reward_parts"]["sum_step_rewards"]
    assert any(passages(each, "user") for each in found)
