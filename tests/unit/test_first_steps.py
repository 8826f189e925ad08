"""What a new user types, wrong and right: each command answers in one sentence, or does what it says."""

from __future__ import annotations

import codecs
import fcntl
import json
import re
import socket
import sqlite3
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
from async_rl.config import apply_override, load_config, reference
from async_rl.engine_protocol import EngineCapacity, EngineHealth
from async_rl.errors import ConfigError
from async_rl.run.identity import check_identity
from async_rl.runtime import yaml12
from async_rl.store.ledger import Ledger
from tests.support.finished_run import records, write_run_folder
from tests.support.run_config import write_run
from tests.support.templates_of_models import chat_of

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
    capacity = EngineCapacity()

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


def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path: Path, refused: Refused) -> None:
    path = write_run(tmp_path)
    path.write_text("run: " + "[" * 500)
    assert "is not valid YAML: its values are nested too deeply" in refused("check", path)


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


# -- `async-rl check` refuses what `async-rl train` refuses -------------------------------------------


BothRefuse = Callable[..., tuple[int, str]]

EVALUATED = "data.validation=[{path: tasks.jsonl}]"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    return write_run(tmp_path)


@pytest.fixture
def both_refuse(capsys: pytest.CaptureFixture[str], path: Path) -> BothRefuse:
    """Run both commands with these words, which must agree; return their exit code and message."""

    def run(*words: str) -> tuple[int, str]:
        here = [word for word in words if word == "--here"]
        overrides = [word for word in words if word not in here]
        code = main(["check", str(path), *here, *overrides])
        said = capsys.readouterr().err
        assert main(["train", str(path), *overrides]) == code != 0
        assert capsys.readouterr().err == said
        return code, said

    return run


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["run.dir=a_file"], 2, "run.dir: cannot create the run folder a_file/tiny: Not a directory"),
        (["run.dir=.", "run.name=a_file"], 2, "cannot create the run folder a_file: File exists"),
        ([f"run.name={'a' * 300}"], 2, "run"),
        (["run.resume=must"], 2, "run.resume is must, but there is no checkpoint in"),
        (["engine.urls_file=nowhere.txt"], 2, "engine.urls_file nowhere.txt cannot be read"),
        (["weights.transport=tensor", "engine.urls=[http://far:1]"], 2, "but the engine is on far: set"),
        (["metrics.targets_dir=a_file/x"], 3, "by which Prometheus finds the run (Not a directory): set"),
        (["engine.device=cuda", "engine.tp_size=3"], 2, "engine.tp_size is 3, but"),
        (
            ["engine.extra_args=[--quantization=fp8]"],
            2,
            "engine.extra_args has --quantization: engines would",
        ),
        (
            ["models={judge: {path: model, tp_size: 8}}", "engine.device=cuda"],
            2,
            "models.judge.tp_size is 8, but model has 4 attention heads in 2 groups",
        ),
        (
            [EVALUATED, "evaluation.agent_loop=nope:X"],
            2,
            "evaluation.agent_loop: agent loop 'nope:X': there is no module 'nope'",
        ),
        (
            [EVALUATED, "evaluation.agent_loop=agent_loops.tool_loop:ToolLoop"],
            2,
            "evaluation.agent_loop: agent_loops.tool_loop:ToolLoop cannot be made with {}",
        ),
        (["placement.resources_per_rank={fast: 1}"], 2, "resources_per_rank names fast, and the Ray that is"),
        (
            ["placement.shared=true", "trainer.device=cuda", "engine.device=cuda", "trainer.num_ranks=2"],
            3,
            "placement.shared",
        ),
    ],
)
def test_check_refuses_what_train_would_when_it_does_not_depend_on_the_machine(
    path: Path, both_refuse: BothRefuse, overrides: list[str], code: int, words: str
) -> None:
    before = sorted(path.parent.rglob("*"))
    found, said = both_refuse(*overrides)
    assert found == code
    assert words in said
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["trainer.device=cuda"], 3, "trainer.device is cuda, but torch sees no GPU"),
        (["engine.device=cuda"], 3, "engine.device is cuda, but this machine has no GPU"),
        (["engine.urls=[http://far:1]"], 2, "the server at http://far:1 is open to other machines"),
        (["queue.spool_dir=a_file/x"], 2, "queue.spool_dir is a_file/x, but "),
        (
            ["queue.journal_dir=a_file"],
            2,
            "a_file is no folder that this process can write into: name another",
        ),
        (["weights.transport=delta", "weights.local_dir=a_file"], 2, "weights.local_dir is a_file, but "),
        (
            ["placement.resources_per_rank.CPU=100000"],
            3,
            "the run reserves 100000 CPUs (trainer ranks 100000), and this",
        ),
    ],
)
def test_check_here_refuses_what_train_would_on_this_machine(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    both_refuse: BothRefuse,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ASYNC_RL_ENGINE_API_KEY", raising=False)
    assert main(["check", str(path), *overrides]) == 0
    capsys.readouterr()
    found, said = both_refuse("--here", *overrides)
    assert found == code
    assert words in said


def test_check_here_refuses_an_address_that_is_in_use(both_refuse: BothRefuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"metrics.port={server.getsockname()[1]}"
        code, said = both_refuse("--here", taken)
    assert code == 3
    assert "cannot serve metrics on" in said


def test_check_compares_with_the_run_that_it_would_continue_and_writes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = path.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    check_identity(load_config(path), folder)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.record_dispatch("g", "row-0", 0, ["g-0"], 0)
    ledger.flush()  # and stays open, as after a kill
    before = {each: each.read_bytes() for each in folder.rglob("*")}
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "model.dtype=float32"]) == 2
    said = capsys.readouterr().err
    assert "model.dtype = bfloat16, which is float32 now" in said
    assert {each: each.read_bytes() for each in folder.rglob("*")} == before
    ledger.close()
    assert main(["train", str(path), "model.dtype=float32"]) == 2
    assert capsys.readouterr().err == said


def test_the_folder_of_a_supervised_run_is_refused(path: Path, both_refuse: BothRefuse) -> None:
    folder = path.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "epoch": 0}\n')
    code, said = both_refuse()
    assert code == 2
    assert "metrics.jsonl belongs to a supervised run: set another run.name" in said
    (folder / "metrics.jsonl").write_text("{junk\n")
    code, said = both_refuse()
    assert code == 2
    assert "metrics.jsonl is damaged in its first line" in said


def test_check_refuses_a_ledger_of_another_version(path: Path, both_refuse: BothRefuse) -> None:
    (folder := path.parent / "runs" / "tiny").mkdir(parents=True)
    Ledger(folder / "ledger.sqlite").close()
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        database.execute("UPDATE meta SET value = 1 WHERE key = 'schema'")
    database.close()
    code, said = both_refuse()
    assert code == 1
    assert "ledger.sqlite has schema 1, this program writes" in said


def test_check_refuses_a_folder_in_which_another_process_runs(path: Path, both_refuse: BothRefuse) -> None:
    (path.parent / "runs" / "tiny").mkdir(parents=True)
    with (path.parent / "runs" / "tiny" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said = both_refuse()
    assert code == 2
    assert "another process runs in" in said


def test_check_tries_the_rewards_of_validation_sets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path.parent / "val.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    reward = "rollout.reward=agent_loops.rewards:last_number"
    assert main(["check", str(path), reward, "data.validation=[{path: val.jsonl}]"]) == 2
    assert "of validation set val: " in capsys.readouterr().err


def test_a_model_is_refused_when_it_has_no_tokenizer(path: Path, both_refuse: BothRefuse) -> None:
    for file in (path.parent / "model").glob("tokenizer*"):
        file.unlink()
    code, said = both_refuse()
    assert code == 2
    assert "no tokenizer; expected one of tokenizer.json" in said


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        ("qwen3", [{"role": "narrator", "content": "Once."}], "messages of the role 'narrator'"),
        (
            "in_parts",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}],
            "'look_up' of an assistant message with tool calls",
        ),
    ],
)
def test_a_row_is_refused_when_the_template_leaves_out_a_part_of_it(
    path: Path, both_refuse: BothRefuse, template: str, messages: list[Any], lost: str
) -> None:
    chat_of(template).tokenizer.save_pretrained(path.parent / "model")
    asked = {"role": "user", "content": "?"}
    row = {"messages": [asked, *messages, asked], "answer": "1"}
    (path.parent / "tasks.jsonl").write_text(json.dumps(row))
    code, said = both_refuse()
    assert code == 2
    assert f"tasks.jsonl:1: the chat template leaves out {lost}" in said


def test_check_warns_of_a_file_that_has_the_name_of_an_installed_module(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("statistics", "agent_loops"):
        (path.parent / f"{name}.py").touch()
    assert main(["check", str(path), "rollout.reward=agent_loops.rewards:exact_match"]) == 0
    out = capsys.readouterr().out
    assert "WARNING: the config names agent_loops.rewards:exact_match, but 'agent_loops' is " in out
    assert main(["check", str(path), "rollout.reward=statistics:mine"]) == 2
    assert f"and not {path.parent}/statistics.py: rename the file" in capsys.readouterr().err
