"""`async-rl evaluate CONFIG`: any model answers the validation sets of a config, without a trainer.

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

import msgspec

from async_rl.cli.inspection.show import terminal
from async_rl.cli.inspection.try_out import (
    ON_THIS_MACHINE,
    OpenEngines,
    engines_from,
    models_asked,
    open_models,
    serve_engines,
)
from async_rl.config import Config, load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import load_validation, prompt_rule
from async_rl.engines.model_facts import load_facts
from async_rl.engines.pool import EnginePool
from async_rl.errors import ConfigError
from async_rl.evaluation.evaluator import Evaluator
from async_rl.observability.evaluation_record import FILE, EvaluationRecord, evaluation_record_log
from async_rl.observability.evaluation_report import show_scores
from async_rl.observability.long_work import LongWork
from async_rl.observability.metrics import Metrics
from async_rl.observability.text_console import TextConsole
from async_rl.placement import rollout_workers
from async_rl.rollout.session.context import SessionContext
from async_rl.run.folder import result_folder, run_in_folder
from async_rl.run.preflight import check_config
from async_rl.runtime.ids import new_id
from async_rl.runtime.printable import print_text
from async_rl.store import archive
from async_rl.store.archive import Archive


def evaluate(
    path: Path,
    overrides: list[str],
    *,
    model: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
    console: TextConsole | None = None,
    open_engines: OpenEngines = engines_from,
) -> int:
    """Evaluate a model on the validation sets of a config.

    Args:
        path: The config's YAML file; `evaluation` says how often and how answers are sampled.
        overrides: `dotted.key=value` changes to it.
        model: A Hugging Face folder; None takes `model.path`.
        out: Folder for the record, the answers and the log; None keeps none of them.
        as_json: Print the record instead of a table.
        console: Where the table is printed; None takes stdout.
        open_engines: Provides the engines that answer.

    Returns:
        The exit code: 1 when no answer could be scored. An error of the evaluation is printed; the log in
        `out` has its traceback.

    Raises:
        ConfigError: The config cannot work, or names no validation set.
    """
    given = [] if model is None else [f"model.path={model}"]
    # All engines that there are answer; none is lent by a run, and none is reserved. Like the engine that is
    # started here, rollout workers are on this machine.
    alone = [
        "evaluation.engines=shared",
        "evaluation.every=0",
        "evaluation.at_start=false",
        "trainer.keep_best=null",
    ]
    config = load_config(path, [*overrides, *given, *alone, *ON_THIS_MACHINE])
    if not config.data.validation:
        raise ConfigError("data.validation names no dataset: add `data.validation: [{path: ...}]`")
    check_config(config)
    shown = console or terminal()

    async def run(folder: Path, stop: asyncio.Event) -> EvaluationRecord:
        return await _evaluate_sets(config, folder, open_engines, keep_answers=out is not None)

    def finish(folder: Path, record: EvaluationRecord) -> int:
        evaluation_record_log(folder / FILE).append(record)
        if as_json:
            print_text(msgspec.json.encode(record).decode())
        else:
            show_scores(shown, config.model.path, record)
            if out is not None:
                shown.print(f"the answers: async-rl inspect {out}")
        return int(not record.scores)

    with tempfile.TemporaryDirectory(prefix="async-rl-evaluate-") as scratch:
        folder = result_folder(out or Path(scratch), config)
        return run_in_folder(folder, config, run, finish=finish, keep_log=out is not None)


async def _evaluate_sets(
    config: Config, folder: Path, open_engines: OpenEngines, *, keep_answers: bool
) -> EvaluationRecord:
    kept: Archive | None = None
    max_calls = config.engine.max_calls
    models = {
        name: EnginePool(Metrics(), time.monotonic, max_calls=max_calls) for name in models_asked(config)
    }
    async with (
        rollout_workers(config, folder) as open_worker,
        open_models(config, folder / "logs", open_engines, models),
        open_engines(config, folder / "logs") as engines,
    ):
        metrics = Metrics()
        pool = EnginePool(metrics, time.monotonic, max_calls=config.engine.max_calls)
        context = SessionContext(
            config=config,
            chat=load_chat_format(config.model.path, config.model.trusted_roles),
            facts=load_facts(config.model.path),
            metrics=metrics,
            clock=time.monotonic,
            serving_clock=pool.own.serving_clock,
            calls=pool.dispatcher,
            new_id=new_id,
            models={name: model.dispatcher for name, model in models.items()},
        )
        evaluator = Evaluator(
            context,
            load_validation(config.data, prompt_rule(config)),
            open_worker=open_worker,
            completions=folder / "completions",
            models=models,
        )
        versions = await serve_engines(engines, config, pool)
        if len(versions) > 1:
            raise ConfigError(
                f"engine.urls: the servers have weight versions {sorted(versions)}, expected one: they "
                "belong to a run that updates them, or were left by one"
            )
        if keep_answers:
            kept = Archive(folder / archive.FILE, evaluator.num_answers, pass_reward=evaluator.pass_reward)
        try:
            with LongWork("evaluating", "answers", evaluator.num_answers) as shown:
                return await evaluator.evaluate_sets(pool, versions.pop(), kept, show_ended=shown.show_done)
        finally:
            if kept is not None:
                kept.close()
