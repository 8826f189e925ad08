"""The command line: output, imports, error messages and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from async_rl.cli.main import main
from async_rl.cli.plan import describe_interrupts
from async_rl.config import load_config, reference
from async_rl.observability.records import StepRecord, step_record_log
from async_rl.planning.workload import calibrate
from async_rl.run.memory_estimate import version_bytes
from async_rl.runtime import loading, yaml12
from async_rl.trainer_protocol import BEST_FILE, BestCheckpoint
from tests.support.run_config import write_run

ROOT = Path(__file__).parents[2]


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom async_rl.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print('\\n'.join(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "usage: async-rl" in out.stdout
    modules = set(out.stdout.split())
    heavy = {"torch", "ray", "transformers", "aiohttp", "numpy", "rich", "msgspec", "asyncio"}
    assert heavy & modules == set()
    assert "async_rl.errors" in modules


def test_check_prints_what_follows_and_the_config_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    words = ["check", str(path), "rollout.max_staleness=1", "--gpus-per-node", "8"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "max_staleness:" not in out
    assert main([*words, "--resolved"]) == 0
    resolved = capsys.readouterr().out
    assert resolved.startswith("".join(f"# {line}\n" for line in out.splitlines()))
    (tmp_path / "resolved.yaml").write_text(resolved)
    assert load_config(tmp_path / "resolved.yaml") == load_config(path, ["rollout.max_staleness=1"])
    assert "model: 3 of 3 layers with 8 experts, top 2" in out
    assert "data: 2 tasks" in out
    assert "groups dispatched and not yet trained, at most: 4" in out
    assert "placement on" in out
    assert "weights by disk: pause of an update" in out
    # 4 calls, each with a prompt of 96 tokens and half of an answer.
    assert "weights.interrupt abort prefills " in out
    assert "prompts of 96 and answers of 8 tokens assumed" in out
    assert "of what in_place would reach" not in out, "nothing says the speeds of engines on CPUs"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.kind=vllm", "engine.kind is 'vllm', expected one of sglang, simulated"),
        ("rollout.max_stalness=2", "did you mean 'max_staleness'"),
        ("engine.decode_step_s=1", "it belongs to kind simulated: remove it, or change engine.kind"),
        ("rollout.rewards={a: {function: f, url: u}}", "it belongs to kind http: remove it, or change "),
        ("foo=1", "model, models, placement,"),
        ("trainer.loss.objective=grpo", "is 'grpo', expected one of ppo, gspo, cispo, or the dotted path"),
        ("model.path=/nowhere", "Set model.path"),
        ("rollout.reward=agent_loops.rewards:exact_mach", "did you mean 'exact_match'"),
        ("rollout.agent_loop_args={wrong: 1}", "rollout.agent_loop_args"),
        ("trainer.worker=no_such_package.worker:Worker", "no_such_package"),
        ("trainer.worker=trainer.worker:Nope", "module 'trainer.worker' has no attribute 'Nope'"),
        ("rollout.max_context_tokens=100000", "context of 512"),
    ],
)
def test_one_sentence_and_exit_code_2_when_the_config_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    path = write_run(tmp_path)
    assert main(["check", str(path), override]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("async-rl: ")
    assert len(captured.err.splitlines()) == 1
    assert said in captured.err


def test_the_best_checkpoint_is_exported_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported: list[Path] = []

    def export(checkpoint: Path, out: Path, **_: object) -> SimpleNamespace:
        exported.append(checkpoint)
        return SimpleNamespace(step=20, checkpoint=checkpoint, skipped_checkpoints=())

    monkeypatch.setattr(loading, "load_object", lambda path, what: export)
    directory = tmp_path / "checkpoints"
    for step in (20, 40):
        (directory / f"step_{step:08d}").mkdir(parents=True)
    words = ["export", "--checkpoint", str(tmp_path), "--out", "out", "--best"]
    assert main(words) == 2
    assert "has no checkpoint that was evaluated" in capsys.readouterr().err
    best = BestCheckpoint(metric="all/reward", step=20, value=0.5)
    (directory / BEST_FILE).write_bytes(msgspec.json.encode(best))
    assert main(words) == 0
    assert main([*words[:2], str(directory), *words[3:]]) == 0
    assert exported == [directory / "step_00000020"] * 2


def test_an_export_is_refused_before_the_trainer_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.runtime.loading.load_object", None)
    words = ["export", "--checkpoint", str(tmp_path), "--out", "out"]
    for more, said in (([], "there is no checkpoint in"), (["--max-shard-bytes=-5"], "is -5, expected")):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("schema > /dev/full", 1, "cannot write the output: No space left on device"),
        (f"check {ROOT}/examples/calculator/config.yaml", 2, "the working directory is gone: change to"),
    ],
)
def test_one_sentence_without_room_or_working_directory(
    tmp_path: Path, command: str, code: int, said: str
) -> None:
    run = f"PYTHONPATH={ROOT} {sys.executable} -m async_rl.cli {command}"
    gone = "mkdir x; cd x; rmdir ../x; " if code == 2 else ""
    done = subprocess.run(f"cd {tmp_path}; {gone}{run}", shell=True, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)
    assert f"async-rl: {said}" in done.stderr


def test_the_remedy_is_named_when_a_dense_model_is_to_replay_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, num_experts=0)
    assert main(["check", str(path)]) == 2
    assert "routing.replay=off" in capsys.readouterr().err
    assert main(["check", str(path), "routing.replay=off"]) == 0


def test_off_policy_data_is_refused_when_nothing_corrects_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other frameworks train on it silently (miles#1829; SkyRL#1315)."""
    path = write_run(tmp_path)
    plain = ["check", str(path), "trainer.loss.importance.level=off"]
    assert main(plain) == 2
    assert "nothing corrects for data of older weights" in capsys.readouterr().err
    for remedy in ("uncorrected=true", "old_log_probs=rollout", "importance.level=token"):
        assert main([*plain, f"trainer.loss.{remedy}"]) == 0
    assert main([*plain, "rollout.max_staleness=0"]) == 0


def test_the_settings_page_is_current() -> None:
    assert (ROOT / "docs" / "reference" / "config.md").read_text() == reference.markdown(), "run `make docs`"


def test_the_resolved_config_loads_to_the_same_when_written(tmp_path: Path) -> None:
    overrides = ["engine={kind: simulated}", "rollout.agent_loop_args={a: ['1e-6', 'off', '010']}"]
    config = load_config(write_run(tmp_path), overrides)
    text = reference.resolved_yaml(config)
    assert msgspec.convert(yaml.safe_load(text), type(config)) == config
    assert msgspec.convert(yaml12.load(text), type(config)) == config


# -- `async-rl plan` ----------------------------------------------------------------------------------


QUICK = ["--versions", "2", "--warmup", "1", "--prompt-tokens", "8"]


def past_run(folder: Path) -> list[StepRecord]:
    """Ten steps of 4 trajectories with a prompt of 20 tokens and 30 sampled tokens; the first is slower."""
    records = [
        StepRecord(
            step=step,
            weight_version=step,
            time_s=10.0 * step,
            trajectories=4,
            tokens=200,
            trained_tokens=120,
            step_s=50.0 if step == 1 else 2.0,
            sync_s=1.0,
            sync_parts={"publish": 0.75, "load": 0.2, "verify": 0.05},
            tokens_per_s=64.0,
        )
        for step in range(1, 11)
    ]
    folder.mkdir()
    for record in records:
        step_record_log(folder / "metrics.jsonl").append(record)
    return records


def test_there_is_a_plan_for_each_number_of_engines_as_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(write_run(tmp_path)), *QUICK]
    assert main([*command, "engine.max_running_requests=2", "--engines", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert "answers lognormal, mean 8, sigma 0.8, cut at 32" in out
    assert "\n1 engines: " in out
    assert "\n2 engines: " in out
    command += ["--sigma", "0", "--mean-tokens", "16", "--sync-s", "5"]
    assert main([*command, "--json", "--engines", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    (plan,) = found["plans"]
    assert plan["workload"]["mean_tokens"] == 16
    assert plan["engines"] == 2
    assert 0 < plan["relative"] <= 1
    # 3 layers with 8 experts, two a token: 6 bytes of rows beside 14 of the packed token.
    assert plan["batch_bytes"] == 2 * 2 * (8 + 16) * (14 + 6)
    assert plan["bottleneck"]


def test_check_says_a_rate_when_the_model_and_gpus_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    gpus = ["engine.kind=sglang", "engine.device=cuda", "model.dtype=bfloat16", "rollout.max_staleness=1"]
    config = load_config(path, gpus)
    (line, *_) = describe_interrupts(config, 8)
    cost = float(line.split(" of what in_place would reach")[0].split()[-1])
    assert 0.9 < cost <= 1, "a tiny model prefills at once"
    assert describe_interrupts(load_config(path, [*gpus, "rollout.max_staleness=0"]), 8) == []


def test_a_plan_simulates_the_change_that_makes_interruptions_cheaper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--mean-tokens", "16", "--prompt-tokens", "64", "--versions", "12", "--warmup", "4"]
    slow = ["--prefill-tokens-per-s", "5000", "--train-tokens-per-s", "1e9", "--sync-s", "0"]
    command = ["plan", str(write_run(tmp_path)), *lengths, *slow]
    assert main([*command, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    prefills, *_, change = plan["interruption"]
    assert "weights.interrupt abort prefills" in prefills
    overrides, gain = change.split(" would reach ")
    assert main([*command, "--json", *overrides.split()]) == 0
    (changed,) = json.loads(capsys.readouterr().out)["plans"]
    ratio = changed["relative"] / plan["relative"]
    assert float(gain.split()[0]) == pytest.approx(ratio, abs=0.005)
    assert ratio > 1.03
    assert main(command) == 0
    assert f"\n  {change}\n" in capsys.readouterr().out


def test_a_plan_says_how_many_calls_a_cache_of_a_given_size_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(write_run(tmp_path)), *QUICK, "--sigma", "0", "--json"]
    assert main([*command, "--cache-tokens", "64"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["cached_calls"] == pytest.approx(64 / (8 + plan["workload"]["mean_tokens"] / 2))


def test_queue_is_named_when_the_plan_needs_a_larger_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    rows = ["--routing-row-bytes", "100000", "--sigma", "0", "--sync-s", "5"]
    assert main(["plan", path, "queue.max_bytes=1048576", *rows, *QUICK, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["queue_bytes_peak"] > 1 << 20
    assert "queue.max_bytes = 1 MB" in plan["bottleneck"]


def test_overlap_is_advised_when_the_trainer_stands_still_for_weight_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    command = ["plan", path, *QUICK, "--versions", "8", "--publish-s", "5", "--train-base-s", "10"]
    still: list[float] = []
    for overlap, advised in (("false", True), ("true", False)):
        assert main([*command, f"weights.overlap={overlap}"]) == 0
        out = capsys.readouterr().out
        assert ("weights.overlap=true" in out) is advised
        line = next(line for line in out.splitlines() if "during weight updates" in line)
        still.append(float(line.split()[-2].removesuffix("%")))
    assert still[1] < still[0] / 2


@pytest.mark.parametrize(
    ("words", "pause_s", "publish_s", "said"),
    [
        ([], 0.1, 0.1, " by arithmetic (publish 0.1 s, load 0.1 s)"),
        (["--publish-s", "3"], 0.1, 3.0, " by arithmetic (load 0.1 s)"),
        (["--sync-s", "2"], 2.0, 0.0, ""),
        (["model.path=/nowhere"], 5.0, 0.0, ", as model.path does not say the model's size"),
    ],
)
def test_the_pause_of_an_update_is_computed_when_nothing_says_it_and_the_model_is_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    pause_s: float,
    publish_s: float,
    said: str,
) -> None:
    path = write_run(tmp_path)
    speed = ["--disk-bytes-per-s", str(10 * version_bytes(load_config(path)))]
    assert main(["plan", str(path), *words, *speed, *QUICK, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    workload = plan["workload"]
    assert (workload["sync_s"], workload["publish_s"]) == pytest.approx((pause_s, publish_s))
    assert main(["plan", str(path), *words, *speed, *QUICK]) == 0
    assert f"pause of an update {pause_s:g} s{said}; " in capsys.readouterr().out


def test_speeds_and_lengths_are_those_of_its_later_steps_when_a_past_run_is_given(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path), ["engine.num_engines=2", "rollout.max_concurrent_trajectories=16"]
    )

    def step_of_8(figures: dict[str, float]) -> float:
        return figures["decode_base_s"] + 8 * figures["decode_per_call_s"]

    steps = past_run(tmp_path / "past")
    figures = calibrate(config, steps)
    assert figures["prompt_tokens"] == 20
    assert figures["mean_tokens"] == 30
    assert figures["train_tokens_per_s"] == 100
    assert figures["sync_s"] == pytest.approx(0.25)
    assert figures["publish_s"] == 0.75
    # 8 calls on each engine make 32 tokens a second, but for pauses of 0.25 s in 10 s: a step of 0.25 s.
    assert step_of_8(figures) == pytest.approx(0.25 * 0.975)
    figures = calibrate(config, [*steps[:-1], replace(steps[-1], engine_idle_share=0.2)])
    assert step_of_8(figures) == pytest.approx(0.25 * 0.8)


def test_each_plan_has_its_own_pause_when_it_depends_on_the_number_of_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["weights.transport=distributed", "--link-bytes-per-s", "1e6", "--engines", "1", "4", "--json"]
    assert main(["plan", str(write_run(tmp_path)), *QUICK, *words]) == 0
    one, four = (plan["workload"]["sync_s"] for plan in json.loads(capsys.readouterr().out)["plans"])
    assert 0 < one < four


def test_flag_counts_when_a_past_run_says_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    past_run(tmp_path / "past")
    arguments = ["plan", path, "--from", str(tmp_path / "past"), *QUICK, "--json"]
    assert main(arguments) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    workload = plan["workload"]
    assert (workload["mean_tokens"], workload["prompt_tokens"]) == (30, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "damaged"], "damaged/metrics.jsonl is damaged in line 2"),
        (["--engines", "0"], "--engines 0: expected at least 1"),
        (["--train-tokens-per-s", "nan"], "train_tokens_per_s is nan, expected a finite number"),
        (["--mean-tokens", "0"], "mean_tokens is 0.0: Expected `float` > 0.0"),
        (["--versions", "0"], "versions is 0: Expected `int` >= 1"),
    ],
)
def test_one_sentence_and_exit_code_2_when_there_is_nothing_to_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    path = str(write_run(tmp_path))
    past_run(tmp_path / "damaged")
    log = tmp_path / "damaged" / "metrics.jsonl"
    log.write_text(log.read_text().replace('{"step":2', "{", 1))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", path, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("async-rl: ")
    assert len(err.splitlines()) == 1
    assert said in err
