"""Attacks that a review tried and that failed; what other files do not attack yet.

docs/security.md lists all of them with their tests.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import gzip
import hmac
import json
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from agent_loops.parsing import PARSERS, load_parser
from agent_loops.sandbox import Limits, Sandbox
from async_rl.config import RoutingConfig, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import ConfigError, WorkerLost
from async_rl.openai_api import endpoint
from async_rl.rollout.workers import link, messages
from async_rl.runtime import yaml12
from async_rl.types import Task
from tests.support.api import asked
from tests.support.talk import lines
from tests.support.templates_of_models import chat_of

MEBIBYTE = 1 << 20


# -- keys --


@pytest.mark.real_time
async def test_keys_are_compared_in_constant_time_and_are_in_no_answer_and_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared = []
    compare = hmac.compare_digest

    def compare_digest(a: str | bytes, b: str | bytes) -> bool:
        compared.append(a)
        return compare(a, b)  # type: ignore[type-var]

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    caplog.set_level("DEBUG", "async_rl")
    caplog.set_level("DEBUG", "aiohttp")
    async with asked(lines("Hello.", "Hello.")) as a, httpx.AsyncClient() as client:
        key = a.access.api_key
        url = f"{a.access.base_url}/chat/completions"
        invalid_keys = (key[:-1], f"{key[:-1]}!", f"{key}0", f"sk-{key.split('-')[1]}-", "sk-", "!")
        answers = [
            await client.post(url, content=body, headers={"Authorization": f"Bearer {wrong}"})
            for wrong in invalid_keys
            for body in (b"{}", b"[", json.dumps({"messages": [], "api_key": key[:-1]}).encode())
        ]
        assert {answer.status_code for answer in answers} == {401}
        assert compared[:2] == [key[:-1], key[:-1]]
        compared.clear()
        await a.say("Hi")
        assert key in compared
        invalid = await client.post(url, content=b"{}", headers={"Authorization": f"Bearer {key}"})
        assert invalid.status_code in (400, 404)
        assert all(key[:-1] not in answer.text for answer in [*answers, invalid])
    assert key[:-1] not in caplog.text


# -- the link of a rollout worker --


def test_no_mutation_of_a_message_makes_anything_but_the_documented_error() -> None:
    rng = random.Random(1)
    task = Task(task_id="t", messages=({"role": "user", "content": "2 + 2"},), answer={"a": [1]})
    valid = [
        messages.encode(message)
        for message in (
            messages.StartAttempt(request_id=1, task=task, trajectory_id="x", group_id="g", attempt=1),
            messages.RevokeEngines(
                engines={"e": messages.Revoked(failure="é" * 100)}, newest_version=1, number=1
            ),
            messages.Heartbeat(
                waits=(messages.LongWait(trajectory_id="x", on="tool", target="t", age_s=6.0),)
            ),
        )
    ]
    refused = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            end = rng.choice([at, at + 1, at + 8, len(data)])
            data[at:end] = rng.choice([rng.randbytes(1), rng.randbytes(9), bytes(8), b"\xff" * 8])
        try:
            messages.decode(bytes(data))
        except WorkerLost:
            refused += 1
    assert refused > 10_000


@pytest.mark.real_time
@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, (1 << 30) + 1])
async def test_a_length_that_no_message_has_allocates_nothing(length: int) -> None:
    async with link.listen("127.0.0.1") as listener, asyncio.TaskGroup() as tasks:
        connecting = tasks.create_task(link.connect_link("127.0.0.1", listener.port, listener.key))
        ours = await listener.accept_link()
        theirs = await connecting
        theirs.transport.write(length.to_bytes(8, "little") + bytes(64))
        with pytest.raises(WorkerLost, match=f"a message of {length} bytes"):
            await ours.receive()
        ours.close()
        theirs.close()


# -- files that others wrote --


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "!!python/name:os.system",
        "!!python/object/new:subprocess.Popen [['true']]",
        "a: !!python/module:os",
    ],
)
def test_yaml_makes_no_objects(text: str) -> None:
    with pytest.raises(yaml12.YAMLError, match="could not determine a constructor"):
        yaml12.load(text)


@pytest.mark.real
def test_no_code_of_a_models_folder_is_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    auto_map = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    about = {"model_type": "evil", "architectures": ["Evil"], "tokenizer_class": "Evil", "auto_map": auto_map}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(about))
    # In a process of its own: without `trust_remote_code`, transformers asks on the terminal.
    code = (
        "import sys\n"
        "from async_rl.data.chat_format import load_chat_format\n"
        "from async_rl.errors import ConfigError\n"
        "try:\n    load_chat_format(sys.argv[1])\n"
        "except ConfigError as error:\n    print('refused', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        input="y\n" * 9, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "refused" in done.stdout
    assert not (tmp_path / "ran").exists()


def test_no_loader_of_transformers_may_ask_whether_to_run_code() -> None:
    root = Path(__file__).parents[2]
    calls = [
        call
        for folder in ("async_rl", "agent_loops", "trainer", "examples", "benchmarks")
        for file in (root / folder).rglob("*.py")
        for call in re.findall(r"\b(?:Auto\w+|reader)\.from_\w+\([^)]*\)", file.read_text(encoding="utf-8"))
    ]
    assert len(calls) >= 2
    assert [call for call in calls if "trust_remote_code=False" not in call] == []


def test_a_chat_template_reaches_no_code() -> None:
    tokenizer = copy.deepcopy(chat_of("qwen3").tokenizer)
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="unsafe"):
        ChatFormat(tokenizer)


def test_engines_get_no_option_to_run_a_models_code(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "m"}, "data": {"path": "x.jsonl"}})
    config = replace(config, routing=RoutingConfig(replay="off"))  # no facts of the model are needed
    command = SGLangServer(config, index=0, log_dir=tmp_path).command()
    assert "--model-path=m" in command
    assert [argument for argument in command if "remote" in argument] == []


# -- text that a policy wrote --


@pytest.mark.timeout(120)  # quadratic work would take hours
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "</tool_call>", "<think>", '{"name": ', "[[[[", "<function=f><parameter=", "```", '\\"'],
)
def test_parsers_end_on_hostile_text(name: str, piece: str) -> None:
    parser = load_parser(name)
    parsed = parser.parse(piece * (MEBIBYTE // len(piece)))
    assert len(parsed.calls) <= 101  # each unreadable call may take time of the whole text


# -- compressed bodies --


@pytest.mark.real_time
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_body_is_not_inflated(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    read: list[int] = []
    decode = endpoint._read_body

    def read_body(dialect: Any, body: bytes, model: str) -> object:
        read.append(len(body))
        return decode(dialect, body, model)

    monkeypatch.setattr(endpoint, "_read_body", read_body)
    bomb = (gzip.compress if encoding == "gzip" else zlib.compress)(
        b'{"messages": "' + bytes(64 * MEBIBYTE) + b'"}'
    )
    assert len(bomb) < MEBIBYTE
    async with asked(lines("Hello.")) as a, httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"{a.access.base_url}/chat/completions",
            content=bomb,
            headers={"Authorization": f"Bearer {a.access.api_key}", "Content-Encoding": encoding},
        )
    assert answer.status_code == 415
    assert read == []


# -- the sandbox --


@pytest.mark.real_time
@pytest.mark.needs("namespaces")
async def test_a_program_finds_no_device_that_keeps_anything_and_no_link_leads_out() -> None:
    ran = await Sandbox(Limits()).run_program(
        "import os\nprint(sorted(os.listdir('/dev')))\n"
        "os.symlink('/etc/passwd', 'x')\nprint(os.path.exists('x'))\n"
        "os.symlink('/proc/1/root', 'y')\nprint(os.path.exists('y/etc/passwd'))"
    )
    devices, *links = ran.output.splitlines()
    assert set(ast.literal_eval(devices)) <= {"null", "zero", "full", "random", "urandom"}
    assert links == ["False", "False"]
