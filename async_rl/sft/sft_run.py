"""`async-rl sft CONFIG`: one supervised run in its folder, with the files of `async-rl train`.

```
<run.dir>/<run.name>/
  config.yaml      the resolved config        metrics.jsonl   one SftRecord per line
  logs/            driver, ranks              checkpoints/    to resume from
  hf/              the model, unless sft.out names another folder
```

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `fine_tune` | batches of the plan | the ranks | a step's end | records, checkpoints, the model |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from async_rl.config import Config, CriticConfig, RoutingConfig, WeightsConfig, load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.engines.model_facts import load_facts
from async_rl.errors import CheckpointError, ConfigError
from async_rl.observability.long_work import LongWork
from async_rl.observability.record_log import RecordLog
from async_rl.observability.records import mean
from async_rl.observability.sft_record import SftRecord, holds_sft_records, sft_record_log
from async_rl.observability.text_console import TextConsole
from async_rl.run.folder import check_run_folder, run_console, run_folder, run_in_folder
from async_rl.run.identity import check_sft_identity
from async_rl.run.preflight import check_trainer, check_trainer_here
from async_rl.runtime.supervision import cut_by
from async_rl.sft.examples import load_conversations
from async_rl.sft.schedule import SftBatch, SftExample, TrainingOrder, batch_of, learning_rate, plan_batches
from async_rl.sft.sft_ranks import SftRanks, start_ranks

OpenRanks = Callable[[Config, Path], AbstractAsyncContextManager[SftRanks]]


class SftData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a supervised run."""

    rows: Sequence[SftExample]
    validation: Sequence[SftExample]
    plan: TrainingOrder
    num_too_long: int
    """Examples left out because they are too long."""


def sft(path: Path, overrides: Sequence[str] = (), open_ranks: OpenRanks = start_ranks) -> int:
    """Train a config's model on its conversations, to the end or until a signal.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        open_ranks: Starts the ranks.

    Returns:
        The exit code. An error of the run is printed; the log has its traceback.

    Raises:
        ConfigError: The config or its data cannot be used; there is no run folder and no log yet.
    """
    config = sft_config(load_config(path, overrides))
    data = read_data(config)
    check_trainer_here(config)
    num_steps = len(data.plan.batches)
    console = run_console()

    def out_of(run_dir: Path) -> Path:
        return run_dir / "hf" if config.sft.out is None else Path(config.sft.out)

    def is_complete(run_dir: Path) -> bool:
        done, out = _read_records(sft_record_log(run_dir / "metrics.jsonl")), out_of(run_dir)
        if not done or done[-1].step < num_steps or not (out / "config.json").exists():
            return False
        console.print(
            f"{out} is complete: raise sft.epochs to continue, or set run.name for another run",
            soft_wrap=True,
        )
        return True

    async def run(run_dir: Path, stop: asyncio.Event) -> None:
        longer = f", {data.num_too_long} longer ones left out" if data.num_too_long else ""
        text = f"{_describe_rows(data.rows)}{longer}; {num_steps} steps; folder {run_dir}"
        console.print(text, soft_wrap=True)
        async with AsyncExitStack() as stack:
            async with cut_by(stop):
                ranks = await stack.enter_async_context(open_ranks(config, run_dir))
            await fine_tune(config, data, run_dir, out_of(run_dir), ranks, stop, console)

    return run_in_folder(
        run_folder(config, partial(_check_identity, config, data)),
        config,
        run,
        finish=lambda run_dir, done: 0,
        is_complete=is_complete,
        on_stop=lambda name: console.print(f"{name}: stopping; a second Ctrl-C aborts", soft_wrap=True),
    )


def check_sft(config: Config) -> list[str]:
    """Check everything of a supervised run that needs no process.

    Returns:
        Findings, one sentence each.

    Raises:
        ConfigError: The config or its data cannot be used.
    """
    supervised = sft_config(config)
    data = read_data(supervised)
    if not config.has_tasks:  # else the folder is checked as that of `async-rl train`
        _check_identity(supervised, data, check_run_folder(config), record=False)
    left_out = f", {data.num_too_long} longer ones left out" if data.num_too_long else ""
    validation = [f"validation: {len(data.validation):,} conversations"] if data.validation else []
    return [
        f"sft: {_describe_rows(data.rows)}{left_out}",
        *(f"sft: {finding}" for finding in validation),
        f"sft: {len(data.plan.batches)} steps",
    ]


def _check_identity(config: Config, data: SftData, run_dir: Path, *, record: bool = True) -> None:
    contents = [
        b"".join(data.rows[i].token_ids.tobytes() + data.rows[i].loss_mask.tobytes() for i in batch)
        for batch in data.plan.batches
    ]
    done = _read_records(sft_record_log(run_dir / "metrics.jsonl"))
    check_sft_identity(config, run_dir, contents, done[-1].step if done else 0, record=record)


def _describe_rows(rows: Sequence[SftExample]) -> str:
    tokens = sum(len(row.token_ids) for row in rows)
    trained = sum(int(row.loss_mask.sum()) for row in rows) / max(tokens, 1)
    return f"{len(rows):,} conversations, {tokens:,} tokens, {trained:.0%} of them trained on"


def sft_config(config: Config) -> Config:
    """Return the config for the ranks: supervised, with the model's own routing.

    Raises:
        ConfigError: It names no conversations.
    """
    if config.sft.path is None:
        raise ConfigError("sft.path is missing: set it to a dataset of conversations")
    trainer = replace(
        config.trainer,
        worker=config.sft.worker,
        optimizer=replace(config.trainer.optimizer, lr=config.sft.lr),
        # Neither a reference nor a critic is built.
        loss=replace(
            config.trainer.loss,
            advantages="reinforce++",
            advantages_args={},
            kl=replace(config.trainer.loss.kl, coefficient=0.0),
        ),
        critic=CriticConfig(),
    )
    weights = WeightsConfig(timeout_s=config.weights.timeout_s)  # there are no engines to send them to
    return replace(config, trainer=trainer, weights=weights, routing=RoutingConfig(replay="off"))


def read_data(config: Config) -> SftData:
    """Read both files and plan the steps; nothing is started yet.

    Raises:
        ConfigError: The model's folder, its chat template, the worker or an example cannot be used.
    """
    settings, facts = config.sft, load_facts(config.model.path)
    if settings.max_tokens > facts.context_length:
        raise ConfigError(
            f"sft.max_tokens is {settings.max_tokens}, but {config.model.path} has a context of "
            f"{facts.context_length} tokens: lower it"
        )
    check_trainer(config, settings.worker, "sft.worker")
    chat = load_chat_format(config.model.path, config.model.trusted_roles)
    rows, left_out = load_conversations(settings.path or "", "sft.path", settings, chat)
    validation: list[SftExample] = []
    if settings.validation is not None:
        validation, more = load_conversations(settings.validation, "sft.validation", settings, chat)
        left_out += more
    plan = plan_batches(
        [len(row.token_ids) for row in rows],
        batch_tokens=settings.batch_tokens,
        epochs=settings.epochs,
        max_steps=settings.max_steps,
        seed=config.run.seed,
    )
    return SftData(rows=rows, validation=validation, plan=plan, num_too_long=left_out)


async def fine_tune(
    config: Config,
    data: SftData,
    run_dir: Path,
    out: Path,
    ranks: SftRanks,
    stop: asyncio.Event,
    console: TextConsole,
) -> None:
    """Run all steps from the newest checkpoint on, and write the model.

    Raises:
        AsyncRLError: A rank failed.
    """
    total = len(data.plan.batches)
    log_of_steps = sft_record_log(run_dir / "metrics.jsonl")
    async with cut_by(stop):
        state = await ranks.setup(str(run_dir / "checkpoints"))
    records = [record for record in _read_records(log_of_steps) if record.step <= state.step]
    begin_s = time.monotonic() - (records[-1].time_s if records else 0.0)
    if state.step:
        console.print(f"resumed after step {state.step}", soft_wrap=True)
    step, saved = state.step, state.step

    async def save() -> int:
        await ranks.save_checkpoint(str(run_dir / "checkpoints"), {})
        return step

    with LongWork("sft", "steps", total, console=console) as shown:
        while step < total and not stop.is_set():
            record = await _take_step(config, data, ranks, step, begin_s)
            step = record.step
            log_of_steps.append(record)
            shown.show_done(
                step, _figures(record), at_once=record.validation_loss is not None or step == total
            )
            every = config.trainer.checkpoint_every
            if every and step % every == 0:
                saved = await save()
    if step > saved:
        await save()
    written = await ranks.saved_checkpoint(wait=True)
    if written.failure is not None:
        raise CheckpointError(written.failure)
    if step >= total:
        out.parent.mkdir(parents=True, exist_ok=True)
        await ranks.publish(str(out), step)
        console.print(f"the model is in {out}: set model.path to it", soft_wrap=True)
    await ranks.close()


async def _take_step(config: Config, data: SftData, ranks: SftRanks, done: int, begin_s: float) -> SftRecord:
    """Take the step after `done` steps, validate if that is due, and return the record."""
    settings, total, step = config.sft, len(data.plan.batches), done + 1
    rate = learning_rate(
        done, total, peak=settings.lr, warmup_steps=settings.warmup_steps, decay=settings.decay
    )
    rows = batch_of([data.rows[row] for row in data.plan.batches[done]], f"sft-{step}")
    before_s = time.monotonic()
    figures = (await ranks.train_step(SftBatch(rows=rows, learning_rate=rate), step)).metrics
    step_s = time.monotonic() - before_s
    validated = None
    due = settings.validate_every and step % settings.validate_every == 0
    if data.validation and (due or step == total):
        validated = await _validate(data.validation, settings.batch_tokens, ranks, step)
    return SftRecord(
        step=step,
        weight_version=step,
        num_steps=total,
        time_s=time.monotonic() - begin_s,
        epoch=data.plan.epochs[done],
        loss=figures["loss"],
        validation_loss=validated,
        grad_norm=figures["grad_norm"],
        learning_rate=rate,
        updates_skipped=int(figures["updates_skipped"]),
        tokens=int(figures["tokens"]),
        trained_tokens=int(figures["trained_tokens"]),
        step_s=step_s,
        tokens_per_s=figures["tokens"] / max(step_s, 1e-9),
    )


def _figures(record: SftRecord) -> str:
    validated = "" if record.validation_loss is None else f"validation loss {record.validation_loss:.4f}, "
    loss = "n/a" if record.loss is None else f"{record.loss:.4f}"
    return f"loss {loss}, {validated}{record.tokens_per_s:,.0f} tokens/s"


async def _validate(
    rows: Sequence[SftExample], batch_tokens: int, ranks: SftRanks, step: int
) -> float | None:
    """Return the mean negative log-prob of the trained tokens of all examples."""
    parts = plan_batches([len(row.token_ids) for row in rows], batch_tokens=batch_tokens, epochs=1, seed=None)
    summed, tokens = 0.0, 0.0
    for part in parts.batches:
        batch = batch_of([rows[row] for row in part], f"validation-{step}")
        part_of_validation = SftBatch(rows=batch, learning_rate=0.0, train=False)
        figures = (await ranks.train_step(part_of_validation, step)).metrics
        summed += figures["loss"] * figures["trained_tokens"]
        tokens += figures["trained_tokens"]
    return mean([summed / tokens])


def _read_records(records: RecordLog[SftRecord]) -> list[SftRecord]:
    if holds_sft_records(records.path) is False:
        raise ConfigError(f"{records.path} does not belong to a supervised run: set another run.name")
    return records.read()
