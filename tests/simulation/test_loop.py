"""The whole loop on simulated engines, with the real components except engines and trainer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from async_rl.config import Config
from async_rl.engine_protocol import Engine, WeightUpdate
from async_rl.engines.lease_dispatcher import LeaseDispatcher
from async_rl.engines.sglang.server import free_port
from async_rl.engines.simulated import scored_tokens
from async_rl.errors import AsyncRLError, NonFiniteLoss
from async_rl.observability.discovery import URL_FILE
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import Summary, step_record_log
from async_rl.run import entry
from async_rl.runtime.supervision import first_error, was_stopped_at_start
from async_rl.store.journal_folders import JournalFolders
from async_rl.types import Completion, Task
from tests.support.local_cluster import LocalCluster
from tests.support.ray_runs import make_run_folder
from tests.support.run_config import config_with
from verification.simulation.__main__ import run_seed
from verification.simulation.simulated_models import score_seed


def count_tokens(task: Task, completion: Completion) -> float:
    return float(len(completion.text))


def always_fail(task: Task, completion: Completion) -> float:
    raise RuntimeError("no such key")


class BrokenTracker:
    """Fails at every step."""

    def __init__(self, config: Config, run_dir: Path) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        raise OSError("disk full")

    def close(self) -> None: ...


class FlakyReward:
    """Fails every third time."""

    calls = 0

    @classmethod
    def score(cls, task: Task, completion: Completion) -> float:
        cls.calls += 1
        if cls.calls % 3 == 0:
            raise RuntimeError("flaky")
        return 1.0


def first_tasks(calculator: Path, folder: Path) -> str:
    """A file with a few of the calculator's tasks: to read all of them takes longer than most runs."""
    path = folder / "first_tasks.jsonl"
    if not path.exists():
        lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:100]))
    return str(path)


def make_config(calculator: Path, tmp_path: Path, *overrides: str) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "sim", "dir": str(tmp_path), "max_steps": 6, "drain_s": 600},
        "model": {"path": str(calculator / "model"), "dtype": "float32"},
        "data": {"path": first_tasks(calculator, tmp_path)},
        "engine": {"kind": "simulated", "num_engines": 2, "decode_step_s": 0.002, "mean_new_tokens": 12},
        "rollout": {
            "group_size": 4,
            "max_concurrent_trajectories": 32,
            "max_staleness": 2,
            "max_context_tokens": 256,
            "max_new_tokens": 64,
            "reward": f"{__name__}:count_tokens",
        },
        "trainer": {"groups_per_batch": 4, "checkpoint_every": 2},
    }
    return config_with(*overrides, **tree)


async def run(
    config: Config, cluster: LocalCluster, stop: asyncio.Event | None = None, **options: Any
) -> Summary:
    run_dir = make_run_folder(config)
    clock = asyncio.get_running_loop().time
    return await entry.run(config, run_dir, stop or asyncio.Event(), cluster, clock=clock, **options)


def metrics_of_the_run(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """The metrics that the next run will fill."""
    metrics = Metrics()
    monkeypatch.setattr(entry, "Metrics", lambda: metrics)
    return metrics


def assert_conserved(summary: Summary) -> None:
    assert summary.trajectories.unaccounted == 0
    assert summary.staleness_max <= summary.max_staleness


@pytest.mark.parametrize(
    "overrides",
    [
        ["weights.interrupt=abort"],
        ["weights.interrupt=retract"],
        ["weights.interrupt=in_place", "routing.merge=splice"],
        ["weights.rolling=true"],
    ],
    ids=["abort", "retract", "in_place", "rolling"],
)
async def test_a_run_trains_every_step_and_accounts_for_every_trajectory(calculator, tmp_path, overrides):
    config = make_config(calculator, tmp_path, *overrides)
    cluster = LocalCluster(config, step_s=0.02)
    summary = await run(config, cluster)
    assert summary.weight_versions == 6
    assert summary.trajectories.trained == 6 * 16
    assert_conserved(summary)
    assert summary.interrupted_share is not None
    assert summary.interrupted_share > 0
    assert summary.routing.rows_checked > 0
    assert summary.routing.rows_invalid == 0
    trained = [i for batch in cluster.trainer.batches for i in batch.trajectory_ids]
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("max_steps", [6, 5])
async def test_engines_take_every_so_manyth_version_and_the_last(calculator, tmp_path, max_steps):
    config = make_config(calculator, tmp_path, "weights.every=3", f"run.max_steps={max_steps}")
    cluster, updates = LocalCluster(config, step_s=0.02), []
    for engine in cluster.engines:
        engine.update_weights = noting_versions(engine, updates)
    summary = await run(config, cluster)
    assert_conserved(summary)
    assert summary.trajectories.trained == max_steps * 16
    assert updates == [3, 3, max_steps, max_steps]
    steps = [json.loads(line)["step"] for line in (tmp_path / "sim/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, max_steps + 1))


def noting_versions(engine: Engine, versions: list[int]) -> Callable[..., Awaitable[None]]:
    update_weights = engine.update_weights

    async def noted(update: WeightUpdate, *, flush: bool) -> None:
        versions.append(update.weight_version)
        await update_weights(update, flush=flush)

    return noted


async def test_the_engine_of_a_groups_prompt_is_forgotten_when_its_trajectories_end_or_fail(
    calculator, tmp_path, monkeypatch
):
    last, lease, forget = dict[str, str](), LeaseDispatcher.lease, LeaseDispatcher.forget_trajectory

    def noted_lease(self: LeaseDispatcher, key: str, tokens: int, *, group: str = "", **options: Any) -> Any:
        last[group] = "lease"
        return lease(self, key, tokens, group=group, **options)

    def noted_forget(self: LeaseDispatcher, key: str, group: str = "") -> None:
        last[group] = "forget"
        forget(self, key, group)

    monkeypatch.setattr(LeaseDispatcher, "lease", noted_lease)
    monkeypatch.setattr(LeaseDispatcher, "forget_trajectory", noted_forget)
    flaky = f"{__name__}:FlakyReward.score"
    config = make_config(calculator, tmp_path, f"rollout.reward={flaky}", "rollout.max_failed_share=1.0")
    await run(config, LocalCluster(config, step_s=0.02))
    assert len(last) >= 6 * 4
    assert set(last.values()) == {"forget"}


async def test_ranks_have_their_places_before_engines_take_any(calculator, tmp_path):
    config = make_config(calculator, tmp_path, "run.max_steps=1")
    order = []

    class Ordered(LocalCluster):
        async def place_trainer(self) -> None:
            order.append("places")

        async def start_engines(self) -> list[Engine]:
            order.append("engines")
            return await super().start_engines()

    await run(config, Ordered(config))
    assert order == ["places", "engines"]


@pytest.mark.real_time
async def test_a_run_is_served_and_announced_where_the_config_says(calculator, tmp_path):
    port = free_port("127.0.0.2")
    config = make_config(
        calculator,
        tmp_path,
        "run.max_steps=1",
        "metrics.host=127.0.0.2",
        f"metrics.port={port}",
        f"metrics.targets_dir={tmp_path / 'targets'}",
    )
    cluster = LocalCluster(config)
    original, seen = cluster.trainer.train_step, []

    async def look(path: str, step: int):
        url = (tmp_path / "sim" / URL_FILE).read_text()
        async with aiohttp.ClientSession() as client, client.get(f"{url}/api/snapshot") as answer:
            now = json.loads(await answer.text())["now"]
        seen.append((url, len(list((tmp_path / "targets").iterdir())), now["step"], now["phase"]))
        assert sum(engine["calls"] for engine in now["engines"]) > 0
        ages = [each["age_s"] for each in now["slowest"]]
        assert ages == sorted(ages, reverse=True) != []
        return await original(path, step)

    cluster.trainer.train_step = look  # type: ignore[method-assign]
    await run(config, cluster)
    assert seen == [(f"http://127.0.0.2:{port}", 1, 0, "training")]


async def test_records_are_of_their_own_step(calculator, tmp_path):
    """Elsewhere metrics are those of the previous step (verl#6796)."""
    config = make_config(calculator, tmp_path)
    cluster = LocalCluster(config)
    original, rewards = cluster.trainer.train_step, []

    async def number(path: str, step: int):
        result = await original(path, step)
        rewards.append(float(cluster.trainer.batches[-1].rewards.mean()))
        return msgspec.structs.replace(result, metrics=result.metrics | {"loss": float(step)})

    cluster.trainer.train_step = number  # type: ignore[method-assign]
    await run(config, cluster)
    records = [json.loads(line) for line in (tmp_path / "sim" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["weight_version"], r["loss"]) for r in records] == [(n, n, n) for n in range(1, 7)]
    assert [r["tokens"] for r in records] == [batch.num_tokens for batch in cluster.trainer.batches]
    assert [r["reward_mean"] for r in records] == pytest.approx(rewards)


async def test_prompts_are_dropped_when_they_are_longer_than_the_context(calculator, tmp_path):
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines()[:40]
    question = {"messages": [{"role": "user", "content": "word " * 400}], "answer": "1"}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([json.dumps(question), *lines]) + "\n")
    overrides = (f"data.path={mixed}", "data.shuffle=false", "data.long_prompts=keep")
    config = make_config(calculator, tmp_path, *overrides)
    summary = await run(config, LocalCluster(config))
    assert summary.trajectories.dropped == {"prompt_too_long": 4}
    assert_conserved(summary)


class LateFailure:
    """Works for a while, then always fails."""

    calls = 0

    @classmethod
    def score(cls, task: Task, completion: Completion) -> float:
        cls.calls += 1
        if cls.calls > 60:
            raise RuntimeError("the judge is gone")
        return float(len(completion.text))


async def test_what_was_trained_is_saved_when_the_run_ends_with_an_error(calculator, tmp_path):
    LateFailure.calls = 0
    config = make_config(
        calculator,
        tmp_path,
        f"rollout.reward={__name__}:LateFailure.score",
        "trainer.checkpoint_every=0",
        "run.max_steps=50",
    )
    cluster = LocalCluster(config)
    with pytest.raises(BaseExceptionGroup):
        await run(config, cluster)
    assert cluster.trainer.step > 0
    assert (await LocalCluster(config).trainer.setup(str(tmp_path / "sim" / "checkpoints"))).step == (
        cluster.trainer.step
    )


async def test_the_run_ends_with_the_cause_when_every_reward_fails(calculator, tmp_path):
    config = make_config(
        calculator, tmp_path, f"rollout.reward={__name__}:always_fail", "rollout.max_failed_share=0.7"
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        await run(config, LocalCluster(config))
    error = first_error(caught.value)
    assert isinstance(error, AsyncRLError)
    assert "more than rollout.max_failed_share = 0.7 allows" in str(error)
    assert "no such key" in str(error)


async def test_a_run_ends_when_its_data_does(calculator, tmp_path):
    lines = (calculator / "data" / "tasks.jsonl").read_text().splitlines()[:10]
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(lines) + "\n")
    config = make_config(calculator, tmp_path, f"data.path={short}", "data.epochs=1", "run.max_steps=50")
    summary = await run(config, LocalCluster(config))
    assert summary.weight_versions == 2  # ten groups are two batches of four; two groups are left
    assert summary.trajectories.queued == 8
    assert_conserved(summary)


@pytest.mark.parametrize("hangs", ["start_engines", "start_trainer", "journals", "health"])
async def test_a_run_that_is_stopped_while_it_starts_ends_at_once(calculator, tmp_path, hangs, monkeypatch):
    config = make_config(calculator, tmp_path)
    stop, cluster = asyncio.Event(), LocalCluster(config)

    async def hang(*arguments: Any, **named: Any) -> None:
        stop.set()
        await asyncio.Event().wait()

    if hangs == "health":  # the engines' first weights are read back
        for engine in cluster.engines:
            engine.health = hang  # type: ignore[method-assign]
    elif hangs == "journals":
        monkeypatch.setattr(JournalFolders, "restore", hang)
    else:
        setattr(cluster, hangs, hang)
    with pytest.raises(ExceptionGroup) as caught:
        await run(config, cluster, stop)
    assert was_stopped_at_start(caught.value)


@pytest.mark.parametrize(
    ("figures", "fails"),
    [
        ({"updates": 1.0, "grad_norm": math.nan}, True),
        ({"updates": 0.0, "grad_norm": math.nan}, False),  # only the critic trains
        ({"updates": 0.0, "loss": math.nan}, True),
        ({"updates_skipped": 1.0, "loss": math.nan}, False),  # the trainer counts them itself
    ],
)
async def test_a_step_that_is_not_finite_ends_the_run_unless_it_updates_nothing(
    calculator, tmp_path, figures, fails
):
    config = make_config(calculator, tmp_path, "run.max_steps=2")
    cluster = LocalCluster(config)
    cluster.trainer.figures = figures
    if not fails:
        assert (await run(config, cluster)).weight_versions == 2
        return
    with pytest.raises(BaseExceptionGroup) as error:
        await run(config, cluster)
    assert error.group_contains(NonFiniteLoss, match="expected a finite number")


async def test_what_was_trained_after_the_checkpoint_comes_again_when_the_trainer_breaks(
    calculator, tmp_path, caplog
):
    trackers = f"metrics.trackers=[jsonl, '{__name__}:BrokenTracker']"
    config = make_config(calculator, tmp_path, "run.max_steps=4", trackers)
    cluster = LocalCluster(config)
    cluster.trainer.fail_at = 4  # steps 1 to 3 are done and logged, the checkpoint is of step 2
    with pytest.raises(BaseExceptionGroup):
        await run(config, cluster)
    again = LocalCluster(config)
    summary = await run(config, again)
    assert [batch.trainer_version for batch in again.trainer.batches] == [2, 3]
    assert summary.trajectories.dropped["restart"] > 0
    assert_conserved(summary)
    logged = [json.loads(line) for line in (tmp_path / "sim" / "tracker.jsonl").read_text().splitlines()]
    records = step_record_log(tmp_path / "sim" / "metrics.jsonl").read()
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert [line["critic/rewards/mean"] for line in logged] == [record.reward_mean for record in records]
    assert sum("disk full" in message for message in caplog.messages) == 2  # once an incarnation


# -- runs with a teacher ------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 8), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("kinds", [("models",), ("models", "workers")], ids="+".join)
def test_every_trained_token_has_its_score_when_a_seed_decides_what_goes_wrong(
    kinds: tuple[str, ...], seeds: range
) -> None:
    failed = {seed: found.violations for seed in seeds if (found := run_seed(seed, kinds)).violations}
    assert failed == {}


async def test_a_teacher_is_never_updated(calculator: Path, tmp_path: Path) -> None:
    models = f"models={{teacher: {{path: {calculator / 'model'}, num_engines: 2}}}}"
    config = make_config(calculator, tmp_path, models, "trainer.loss.teacher.model=teacher")
    cluster = LocalCluster(config, step_s=0.02)
    summary = await run(config, cluster)
    assert summary.weight_versions == 6
    for engine in cluster.models["teacher"].engines:
        assert (await engine.health()).weight_version == 0
    assert {(await engine.health()).weight_version for engine in cluster.engines} == {6}
    for batch in cluster.trainer.batches:
        assert batch.teacher_log_probs is not None
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            wanted = scored_tokens(batch.token_ids[start:end].tolist(), 0, score_seed("teacher"))
            sampled = batch.loss_mask[start:end]
            assert np.array_equal(batch.teacher_log_probs[start:end], np.where(sampled, wanted, 0))
