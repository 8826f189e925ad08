"""What a new user types, wrong and right: each command answers in one sentence, or does what it says."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from async_rl.cli.inspection.try_out import rollout
from async_rl.cli.main import main
from async_rl.config import apply_override, reference
from async_rl.engine_protocol import EngineHealth
from async_rl.errors import ConfigError
from async_rl.runtime import yaml12
from tests.support.finished_run import records, write_run_folder
from tests.support.run_config import write_run

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "calculator" / "config.yaml"
CONFIGS = sorted(
    path for path in (ROOT / "examples").glob("*/*.yaml") if "model:" in path.read_text()
)  # not those of Kubernetes

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must end with exit code 2 and one sentence; return the sentence."""

    def run(*words: Any) -> str:
        assert main([str(word) for word in words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("async-rl: ")
        assert len(captured.err.splitlines()) == 1
        return captured.err

    return run


# -- plan --------------------------------------------------------------------------------------------------


def test_plan_does_not_mind_limits_of_real_tokens_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "trainer.loss.overlong_buffer_tokens=40",
        "trainer.updates_per_batch=8",
        "data.validation=[{path: held-out.jsonl}]",
        "evaluation={every: 5, engines: 1}",
        *("--engines", "1", "--grow", "--versions", "2", "--warmup", "1"),
    ]
    assert main(["plan", str(QUICKSTART), *words]) == 0
    assert "of the fluid bound" in capsys.readouterr().out


# -- servers started elsewhere -----------------------------------------------------------------------------


class _OtherModel:
    """An external server; it says which model it serves."""

    engine_id = "engine-0"

    async def health(self) -> EngineHealth:
        return EngineHealth(weight_version=0, model_path="/models/another")


def test_rollout_refuses_a_server_of_another_model(calculator: Path) -> None:
    @asynccontextmanager
    async def open_engines(config: Any, log_dir: Path):
        yield [_OtherModel()]

    overrides = [
        f"model.path={calculator / 'model'}",
        f"data.path={calculator / 'data' / 'tasks.jsonl'}",
        "engine.urls=['http://127.0.0.1:30500']",
    ]
    with pytest.raises(ConfigError, match=r"engine-0 serves /models/another, but model\.path is"):
        rollout(QUICKSTART, overrides, number=1, open_engines=open_engines)


# -- check: the model's files ------------------------------------------------------------------------------


def test_a_folder_without_weights_is_refused(tmp_path: Path, refused: Refused) -> None:
    path = write_run(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "a config.json and no weights: expected *.safetensors" in refused("check", path)
    assert "no weights" in refused("train", path)
    (tmp_path / "model" / "pytorch_model.bin").touch()
    assert "save the model as safetensors" in refused("check", path)


def test_weights_that_are_truncated_are_refused(tmp_path: Path, refused: Refused) -> None:
    path, file = write_run(tmp_path), tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, 40, 5, 0):
        file.write_bytes(whole[:size])
        assert "truncated" in refused("check", path)
    file.write_bytes(whole + b"more")
    assert "it is damaged" in refused("check", path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    assert "run `git lfs pull`" in refused("check", path)


def test_a_missing_file_of_several_is_named(tmp_path: Path, refused: Refused) -> None:
    path, model = write_run(tmp_path), tmp_path / "model"
    files = [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    (model / "model.safetensors").rename(model / files[0])
    index = {"weight_map": {"model.embed_tokens.weight": files[0], "lm_head.weight": files[1]}}
    index_file = model / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index))
    said = refused("check", path)
    assert f"lacks 1 of the 2 files of weights that {index_file.name} names, such as {files[1]}" in said


def write_config(tmp_path: Path, **changed: Any) -> None:
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_weights_of_another_size_or_without_some_layers_are_refused(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = write_run(tmp_path), tmp_path / "model" / "model.safetensors"

    def write_layers(*layers: int) -> None:
        names = [f"model.layers.{layer}.input_layernorm.weight" for layer in layers]
        names += ["visual.layers.0.weight"]  # those of another part do not count
        embedding = {"model.embed_tokens.weight": np.zeros((512, 64), np.float32)}
        save_file(embedding | {name: np.zeros(64, np.float32) for name in names}, file)

    weights = {**load_file(file), "model.layers.3.input_layernorm.weight": np.zeros(64)}
    save_file(weights, file)  # one more: multi-token prediction
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    write_layers(1)
    assert "num_hidden_layers 3, but the weights lack the layers 0, 2: download" in refused("check", path)
    write_config(tmp_path, num_hidden_layers=9)
    assert "lack the layers 0, 2, 3, …: download" in refused("train", path)
    write_layers(0, 1, 2)
    write_config(tmp_path, num_hidden_layers=3, hidden_size=128)
    columns = "has hidden_size 128, but model.embed_tokens.weight in model.safetensors has 64 columns"
    assert columns in refused("check", path)
    write_config(tmp_path, vocab_size="many")
    assert "has a value that cannot be used: vocab_size is 'many'" in refused("check", path)


@pytest.mark.parametrize(
    "part",
    [
        "lm_head",
        "embed_tokens",
        "model.norm",
        "layers.1.self_attn.q_norm",
        "layers.2.mlp.experts.3.",
        "model.",
    ],
)
def test_a_weight_that_is_missing_is_named(tmp_path: Path, refused: Refused, part: str) -> None:
    path, file = write_run(tmp_path), tmp_path / "model" / "model.safetensors"
    save_file({f"base.{n}" if part in n else n: weight for n, weight in load_file(file).items()}, file)
    assert part in (said := refused("check", path))
    assert "and the weights have none: download the whole model" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 4}, "k_proj.weight with the shape [64, 64], and the weights have [32, 64]"),
        ({"head_dim": 32}, "self_attn.q_proj.weight with the shape [128, 64]"),
        ({"num_experts": 16}, "model.layers.0.mlp.experts.8.down_proj.weight with the shape"),
        ({"num_experts": 4}, "mlp.gate.weight with the shape [4, 64], and the weights have [8, 64]"),
        ({"moe_intermediate_size": 128}, "experts.0.down_proj.weight with the shape [64, 128]"),
        ({"hidden_size": None}, "does not say 'hidden_size'"),
        ({"intermediate_size": None}, "does not say 'intermediate_size'"),
    ],
)
def test_weights_of_other_shapes_are_refused(
    tmp_path: Path, refused: Refused, change: dict[str, Any], words: str
) -> None:
    path = write_run(tmp_path)
    write_config(tmp_path, **change)
    assert words in refused("check", path)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path, refused: Refused) -> None:
    path, file = write_run(tmp_path), tmp_path / "model" / "model.safetensors"
    file.unlink()
    file.mkdir()
    assert f"cannot read the weights in {file}: Is a directory" in refused("check", path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    calculator: Path, tmp_path: Path, refused: Refused
) -> None:
    path, model = write_run(tmp_path, vocab_size=16), tmp_path / "model"
    for file in (calculator / "model").iterdir():
        if not (model / file.name).exists():
            (model / file.name).write_bytes(file.read_bytes())
    said = refused("check", path, "data.long_prompts=keep")
    assert "tokens, and its config.json only vocab_size 16" in said


# -- check: the user's code --------------------------------------------------------------------------------


CODE = """
class NotAsync:
    def run(self, task, session): ...

class NoRun: ...

class OneArgument:
    async def run(self, task): ...

class Fine:
    async def run(self, task, session): ...

class Fails:
    def __init__(self): open("/nowhere/index")
    async def run(self, task, session): ...

def good(task, completion, scale=1.0): return 1.0
def verl(solution_str, ground_truth): return 1.0
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config and code in a folder that is not the current one; what is loaded is unloaded afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr("async_rl.runtime.loading.IMPORT_FOLDERS", [])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "code_beside.py").write_text(CODE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return write_run(tmp_path / "mine")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.agent_loop=code_beside:NotAsync", "`run` is not async; expected `async def run(self, task"),
        ("rollout.agent_loop=code_beside:NoRun", "has no method `run`; expected `async def run(self, task"),
        ("rollout.agent_loop=code_beside:OneArgument", "cannot be called: too many positional arguments"),
        ("rollout.agent_loop=code_beside:Fails", "cannot be made: FileNotFoundError: "),
        ("rollout.reward=code_beside:verl", "does not accept a call with (data_source=, solution_str=, "),
        (
            "rollout.rewards={r: {function: 'code_beside:good', args: {factor: 2}}}",
            "with (task, completion, factor=): got an unexpected keyword argument 'factor'",
        ),
        (
            "rollout.agent_loop=agent_loops.tool_loop:ToolLoop "
            "rollout.agent_loop_args={tools: [{mcp: {command: [no-such-server]}}]}",
            "there is no program 'no-such-server'; expected one on the PATH",
        ),
    ],
)
def test_code_that_cannot_be_called_is_refused_before_a_start(
    beside: Path, refused: Refused, override: str, said: str
) -> None:
    assert said in refused("check", beside, *re.split(" (?=rollout)", override))


def test_a_fixed_port_is_refused_before_a_start_when_two_processes_would_need_it(
    beside: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "rollout.agent_loop=agent_loops.openai_agent:OpenAIAgentLoop",
        "rollout.agent_loop_args={agent: 'code_beside:good', port: 8123}",
        f"data.validation=[{{path: {beside.parent}/tasks.jsonl}}]",
    ]
    assert main(["check", str(beside), *words]) == 0
    capsys.readouterr()
    assert "is set: evaluations would serve" in refused("check", beside, *words, "evaluation.every=1")
    workers = refused("check", beside, *words, "engine.kind=sglang", "rollout.num_workers=2")
    assert "rollout.num_workers is 2: all of them, on this machine, would serve at it" in workers


def test_a_module_beside_the_config_is_found_from_another_folder(
    beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rollout.agent_loop=code_beside:Fine", "rollout.reward=code_beside:good"]
    assert main(["check", str(beside), *words]) == 0
    assert "agent loop: code_beside:Fine, of 2 tasks" in capsys.readouterr().out
    assert main(["check", str(beside), "rollout.agent_loop=nowhere_at_all:Loop"]) == 2
    assert f"a file in {Path.cwd()} or {beside.parent}" in capsys.readouterr().err


# -- supervised configs, and the schema --------------------------------------------------------------------


def test_a_supervised_config_is_checked_and_other_commands_name_sft(
    calculator: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    path, conversations = write_run(tmp_path), tmp_path / "conversations.jsonl"
    tree = {"model": {"path": str(calculator / "model")}, "sft": {"max_tokens": 64}}
    path.write_text(yaml.safe_dump(tree))
    said = refused("sft", path)
    assert "sft.path is missing" in said
    assert "data.path" not in said
    tree["sft"]["path"] = str(conversations)
    path.write_text(yaml.safe_dump(tree))
    for command in ("train", "rollout", "plan"):
        assert "it is one for `async-rl sft`: run that, or set data.path" in refused(command, path)
    assert "sft.path: there is no file" in refused("check", path)
    messages = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
    conversations.write_text(json.dumps({"messages": messages}))
    assert main(["check", str(path)]) == 0
    assert "sft: 1 conversations, " in capsys.readouterr().out


def test_the_schema_accepts_every_shipped_config_and_refuses_what_the_loader_refuses() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(reference.json_schema()))
    for path in CONFIGS:
        validator.validate(yaml12.load(path.read_text()))
    for override in ("engine.num_engins=2", "engine={kind: simulated, tp_size: 2}", "run.max_steps=no"):
        tree = yaml12.load(QUICKSTART.read_text())
        apply_override(tree, override)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(tree)


# -- messages about the config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_staleness=-1", "override 'rollout.max_staleness=-1': Expected 'int' >= 0"),
        ("modle.path=x", "override 'modle.path=x': unknown field 'modle'"),
        ("data.datasets=[{pat: x}]", "override 'data.datasets=[{pat: x}]': "),
        ("placement.shared=yes", "found 'yes'; write true"),
        ("rollout={group_size: 2", "'rollout={group_size: 2': the value is not valid YAML: while parsing a"),
    ],
)
def test_an_override_is_blamed_for_its_own_mistake(
    tmp_path: Path, refused: Refused, override: str, said: str
) -> None:
    path = write_run(tmp_path)
    message = refused("check", path, "run.max_steps=5", override)
    assert said in message
    assert "run.yaml" not in message
    path.write_text(path.read_text().replace("group_size: 2", "group_size: yes"))
    assert f"async-rl: {path}: Expected 'int'" in refused("check", path, "rollout.max_staleness=1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:\n\tname: x\n", "found character '\\t' that cannot start any token (line 2, column 1)"),
        ("run:\n  name: a\n  seed: 1\n  name: b\n", "the key 'name' is in line 2 already (line 4, column 3)"),
        ("run: " + "[" * 500, "is not valid YAML: its values are nested too deeply"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_in_one_line(
    tmp_path: Path, refused: Refused, text: str, said: str
) -> None:
    path = write_run(tmp_path)
    path.write_text(text)
    assert said in refused("check", path)


def test_files_with_a_byte_order_mark_are_read(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tasks = write_run(tmp_path), tmp_path / "tasks.jsonl"
    text, rows = path.read_text(), tasks.read_text()
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    tasks.write_bytes(codecs.BOM_UTF8 + rows.encode())
    assert main(["check", str(path)]) == 0
    assert "data: 2 tasks" in capsys.readouterr().out
    tasks.write_text(rows, encoding="utf-16")
    assert "tasks.jsonl is UTF-16 by its byte-order mark: save it as UTF-8" in refused("check", path)
    path.write_text(text, encoding="utf-16")
    assert "run.yaml is not UTF-8 (invalid start byte at byte 0): save it as UTF-8" in refused("check", path)


# -- a run by its name, and what its displays say ------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `runs/mine` below the current folder."""
    monkeypatch.chdir(tmp_path)
    return write_run_folder(tmp_path / "runs" / "mine", records(30), max_steps=30)


def test_every_command_takes_a_run_by_its_name(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "mine"]) == 0
    assert capsys.readouterr().out == "runs/mine/report.html\n"
    (finished / "url").write_text("http://127.0.0.1:9")
    assert main(["doctor", "mine"]) == 0
    assert "runs/mine ended at 20" in capsys.readouterr().out
    quick = ["--versions", "2", "--warmup", "1"]
    assert main(["plan", str(QUICKSTART), "--from", "mine", *quick]) == 0


@pytest.mark.parametrize(
    "words", [["report"], ["doctor"], ["inspect"], ["export", "--out", "o", "--checkpoint"]]
)
def test_a_run_that_is_nowhere_is_named(finished: Path, refused: Refused, words: list[str]) -> None:
    said = refused(*words, "other")
    assert f"there is no run folder 'other' (searched in {Path.cwd()} and in runs/)" in said
