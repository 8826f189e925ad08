"""`async-rl evaluate CONFIG`: the validation sets of a config, answered by any model, without a trainer.

```
 data.validation ──► Evaluator ──► engines of the config: started here, engine.urls, or simulated
                        └──► a table, evaluations.jsonl and the answers in a folder, for `async-rl inspect`
```
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from uuid6 import uuid7

from async_rl.cli.inspection.try_out import OpenEngines, engines_of
from async_rl.config import Config, SGLangEngines, load_config
from async_rl.config.reference import resolved_yaml
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import load_validation, prompt_rule
from async_rl.engines.model_facts import load_facts
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.evaluation.evaluator import Evaluator
from async_rl.observability.evaluation_record import FILE, Estimate, EvaluationRecord, evaluation_record_log
from async_rl.queue import archive
from async_rl.queue.archive import Archive
from async_rl.run.folder import console as default_console
from async_rl.run.preflight import check
from async_rl.runtime.processes import private_files
from async_rl.runtime.supervision import first_error


def evaluate(
    path: Path,
    overrides: list[str],
    *,
    model: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
    console: Console | None = None,
    open_engines: OpenEngines = engines_of,
) -> int:
    """Evaluate a model on the validation sets of a config.

    Args:
        path: The config's YAML file; `evaluation` says how often and how answers are sampled.
        overrides: `dotted.key=value` changes to it.
        model: A Hugging Face folder; None takes `model.path`.
        out: Folder for the record and the answers; None keeps none.
        as_json: Print the record instead of a table.
        console: Where; None takes stdout.
        open_engines: Gives engines that answer.

    Returns:
        The exit code: 1 when no answer could be scored.

    Raises:
        ConfigError: The config cannot work, or names no validation set.
        EnvironmentNotReady: An engine did not come up.
        EngineError: All engines were lost, or `evaluation.timeout_s` is over.
    """
    given = [] if model is None else [f"model.path={model}"]
    # All engines that there are answer, and no old one is asked for.
    config = load_config(path, [*overrides, *given, "evaluation.engines=shared"])
    if not config.data.validation:
        raise ConfigError("data.validation names no dataset: add `data.validation: [{path: ...}]`")
    check(config)
    with private_files():
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.yaml").write_text(resolved_yaml(config))
        try:
            record = asyncio.run(_examine(config, out, open_engines))
        except ExceptionGroup as group:
            cause = first_error(group)
            if not isinstance(cause, AsyncRLError):
                raise
            raise cause from group
        if out is not None:
            evaluation_record_log(out / FILE).append(record)
    if as_json:
        print(msgspec.json.encode(record).decode())
    else:
        show(console or default_console(), config.model.path, record)
        if out is not None:
            (console or default_console()).print(f"the answers: async-rl inspect {out}", highlight=False)
    return int(not record.scores)


async def _examine(config: Config, out: Path | None, open_engines: OpenEngines) -> EvaluationRecord:
    evaluator = Evaluator(
        config,
        load_validation(config.data, prompt_rule(config)),
        chat=load_chat_format(config.model.path),
        facts=load_facts(config.model.path),
        new_id=lambda: uuid7().hex,
        clock=time.monotonic,
    )
    pool, versions = evaluator.pool(), set[int]()
    kept = None if out is None else Archive(out / archive.FILE, keep=evaluator.num_answers)
    scratch = tempfile.TemporaryDirectory(prefix="async-rl-evaluate-")
    try:
        async with open_engines(config, (out or Path(scratch.name)) / "logs") as engines:
            for engine in engines:
                health = await engine.health()
                _check_model(config, engine.engine_id, health.model_path)
                versions.add(health.weight_version)
                pool.add(engine)
                pool.serve(engine.engine_id, health.weight_version)
            if len(versions) > 1:
                raise ConfigError(
                    f"engine.urls: the servers have weight versions {sorted(versions)}, expected one: they "
                    "belong to a run that updates them, or were left by one"
                )
            return await evaluator.evaluate_sets(pool, versions.pop(), kept)
    finally:
        scratch.cleanup()
        if kept is not None:
            kept.close()


def _check_model(config: Config, engine_id: str, serves: str) -> None:
    """An external server may have been started with another model."""
    external = isinstance(config.engine, SGLangEngines) and (config.engine.urls or config.engine.urls_file)
    if external and serves and Path(serves).resolve() != Path(config.model.path).resolve():
        raise ConfigError(
            f"engine {engine_id} serves {serves}, but model.path is {config.model.path}: start it with that "
            "model, or leave out engine.urls, so that one is started here"
        )


def show(console: Console, model: str, record: EvaluationRecord) -> None:
    """Print a record as a table: a line a set."""
    ks = sorted({k for score in record.scores.values() for k in score.pass_at}, key=int)
    table = Table(title=f"{model}, {record.asked} answers in {record.duration_s:.0f} s", title_justify="left")
    table.add_column("set")
    for name in ("tasks", "reward", *(f"pass@{k}" for k in ks), "tokens", "truncated"):
        table.add_column(name, justify="right")
    for name, score in record.scores.items():
        table.add_row(
            name,
            str(score.tasks),
            _told(score.reward),
            *(_told(score.pass_at[k]) for k in ks),
            _number(score.tokens_mean, ".0f"),
            _number(score.truncated_share, ".0%"),
        )
    console.print(table)
    if record.dropped:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(record.dropped.items()))
        console.print(f"answers that were dropped: {dropped}", style="yellow", highlight=False)


def _told(estimate: Estimate) -> str:
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None or low is None or high is None:
        return _number(value, ".3f")
    return f"{value:.3f} ± {max(value - low, high - value):.3f}"


def _number(value: Any, form: str) -> str:
    return "n/a" if value is None else format(value, form)
