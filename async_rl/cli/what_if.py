"""`async-rl what-if RUN key=value …`: predicts how a past run would have gone under other settings.

`async_rl.planning.run_fit` fits a simulation to the run's record. This module checks which settings a
simulation can express, and prints recorded, simulated and predicted figures side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from rich.table import Table

from async_rl.cli.plan import coarsening
from async_rl.config import Config, SGLangEngines, load_config
from async_rl.errors import ConfigError
from async_rl.observability.long_work import LongWork
from async_rl.observability.text_console import TextConsole
from async_rl.planning.past_run import PastRun, read_past_run
from async_rl.planning.planned_job import PlannedRun
from async_rl.planning.run_fit import (
    SIMULATIONS,
    FittedRun,
    RunFigures,
    fit_run,
    simulate_past,
    simulated_figures,
    slow_engines,
)
from async_rl.planning.workload import num_engines, with_engines
from async_rl.run.folder import find_run_folder
from async_rl.runtime.printable import print_text

EXPRESSED: Final = frozenset(
    (
        *("engine.num_engines", "engine.max_running_requests", "engine.max_calls"),
        *("rollout.group_size", "rollout.max_concurrent_trajectories"),
        *("rollout.max_staleness", "rollout.staleness_policy", "rollout.straggler_wait_s"),
        *("routing.merge", "trainer.groups_per_batch"),
        *("weights.every", "weights.interrupt", "weights.overlap", "weights.rolling"),
    )
)
"""The settings that a simulation expresses: those of the scheduler. `routing.merge` costs it nothing."""

HOW: Final = PlannedRun(versions=12, warmup=6)
"""How long its simulations are."""


def what_if(run: Path, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Print what a past run's settings, and changes to them, are predicted to give.

    Args:
        run: The run's folder, or its name below `runs`.
        overrides: `dotted.key=value` changes to its config; without one, only the run itself is predicted.
        as_json: Print JSON instead of a table.

    Returns:
        The exit code.

    Raises:
        ConfigError: The run's record does not suffice, or a simulation cannot express a setting.
    """
    folder = find_run_folder(run)
    past = read_past_run(folder)
    check_expressible(past)
    config = changed_config(folder, past, overrides)
    how = replace(HOW, coarsen=coarsening(past.config, config))
    total = (how.warmup + how.versions) * (SIMULATIONS + bool(overrides))
    done = 0

    with LongWork(f"simulating {folder.name}", "steps", total) as shown:

        def count_step(step: int) -> None:
            nonlocal done
            done += 1
            shown.show_done(done)

        fitted = fit_run(past, how, on_step=count_step)
        changed = _predict(fitted, config, how, count_step) if overrides else None
    remarks = [*remarks_on(fitted, config), *remarks_on_config(folder, past, overrides)]
    if as_json:
        print_text(json.dumps(_as_tree(fitted, changed, remarks), indent=1))
    else:
        _show(TextConsole(), folder, fitted, changed, overrides, remarks)
    return 0


def changed_config(folder: Path, past: PastRun, overrides: Sequence[str]) -> Config:
    """Return the config of a past run with changes.

    Raises:
        ConfigError: A setting is unknown, its value is wrong, or a simulation cannot express it.
    """
    # Replay is nothing that a simulation does, and would forbid some ways to interrupt.
    config = load_config(folder / "config.yaml", [*overrides, "routing.replay=off"])
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in EXPRESSED and _value_at(config, key) != _value_at(past.config, key):
            raise ConfigError(
                f"{key} is no setting that a simulation expresses: it keeps the run's model, data, "
                f"trajectories and speeds, and varies {', '.join(sorted(EXPRESSED))}"
            )
    asked = any(override.partition("=")[0].strip() == "engine.num_engines" for override in overrides)
    return with_engines(config, config.engine.num_engines if asked else num_engines(past.config))


def _value_at(config: Config, key: str) -> Any:
    value: Any = msgspec.to_builtins(config)
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) and part in value else None
    return value


def check_expressible(past: PastRun) -> None:
    """Refuse runs whose scheduling a simulation cannot express.

    Raises:
        ConfigError: It is one.
    """
    config = past.config
    unlike = {
        "placement.shared": config.placement.shared,
        "rollout.dynamic_filtering": config.rollout.dynamic_filtering,
    }
    for name, is_set in unlike.items():
        if is_set:
            raise ConfigError(f"the run has {name}=true, which a simulation cannot express")


def _predict(
    fitted: FittedRun, config: Config, how: PlannedRun, on_step: Callable[[int], None]
) -> RunFigures:
    run = simulate_past(fitted.past, config, fitted.workload, fitted.sharing, how, on_step=on_step)
    return simulated_figures(run, config, fitted.workload, how)


def remarks_on(fitted: FittedRun, config: Config) -> list[str]:
    """Return what stands out in the record, and what limits a prediction, in sentences."""
    before = fitted.past.config
    remarks = [f"{each}." for each in slow_engines(fitted.past.calls)]
    if config.weights.overlap and not before.weights.overlap:
        remarks.append(
            "The run did not copy its weights (weights.overlap): the copy is taken to cost nothing."
        )
    if fitted.sharing.by_trainer:
        remarks.append(
            f"Engines and trainer share cores: a step adds {fitted.sharing.by_trainer:.0%} to the engines' "
            "times. What engines add to each other and to a step follows by symmetry."
        )
    if config.batch_trajectories != before.batch_trajectories:
        remarks.append("A trainer step is taken to grow in proportion to the tokens of its batch.")
    if num_engines(config) != num_engines(before):
        remarks.append("A weight update is taken to last as long as with the run's number of engines.")
        if isinstance(config.engine, SGLangEngines) and config.engine.device == "cpu":
            remarks.append("Each engine is taken to have cores of its own: without, more are no faster.")
    if "retract" in (config.weights.interrupt, before.weights.interrupt):
        remarks.append(
            "What engines prefill again after weights.interrupt=retract is not in a record: rates with it "
            "are expected up to 20% too high."
        )
    dropped = fitted.past.records[-1].dropped_reasons
    if dropped:
        of = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())
        remarks.append(
            f"The run dropped trajectories ({of}), whose lengths are not in the record: simulated answers "
            "are shorter than its own."
        )
    return remarks


def remarks_on_config(folder: Path, past: PastRun, overrides: Sequence[str]) -> list[str]:
    """Return what a real run would make of the settings, in sentences."""
    remarks = []
    config, simulated = load_config(folder / "config.yaml"), num_engines(past.config)
    try:
        configured = num_engines(config)
    except ConfigError:  # the file of their URLs is gone
        configured = simulated
    if configured != simulated:
        remarks.append(
            f"The record has calls of {simulated} engines, and config.yaml names {configured}: "
            f"{simulated} are simulated."
        )
    if config.evaluation.every:
        remarks.append("Evaluations are left out, also where they had engines of the run.")
    try:
        load_config(folder / "config.yaml", overrides)
    except ConfigError as error:
        remarks.append(f"A run refuses these settings: {error}")
    return remarks


_ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    ("versions_per_s", "versions a minute", "rate"),
    ("trajectories_per_s", "trained trajectories/s", "rate"),
    ("tokens_per_s", "trained tokens/s", "rate"),
    ("trainer_waits", "trainer waits for a batch", "share"),
    ("trainer_trains", "trainer trains", "share"),
    ("trainer_syncs", "weight updates pause it", "share"),
    ("calls_running", "running calls of an engine", "number"),
    ("staleness_mean", "staleness, mean", "number"),
    ("staleness_max", "staleness, max", "number"),
    ("interrupted", "interrupted trajectories", "share"),
)


def _cell(figures: RunFigures, name: str, kind: str) -> str:
    value = getattr(figures, name)
    if kind == "share":
        return f"{value:.1%}"
    return f"{value * 60:.2f}" if name == "versions_per_s" else f"{value:,.2f}"


def expected(fitted: FittedRun, changed: RunFigures, name: str) -> float:
    """Return a rate of the changed run: the recorded one, times the ratio of the two simulated ones."""
    ratio = getattr(changed, name) / getattr(fitted.simulated, name)
    return float(getattr(fitted.recorded, name) * ratio)


def _show(
    console: TextConsole,
    folder: Path,
    fitted: FittedRun,
    changed: RunFigures | None,
    overrides: Sequence[str],
    remarks: Sequence[str],
) -> None:
    past = fitted.past
    steps = len(past.records) - past.num_warm_up
    table = Table(
        title=f"{folder.name}: {steps} steps, {len(past.trajectories)} trajectories", title_justify="left"
    )
    for name in ("", "recorded", "simulated", "off by", *(("changed", "change") if changed else ())):
        table.add_column(name, justify="left" if not name else "right")
    for name, title, kind in _ROWS:
        before, now = getattr(fitted.recorded, name), getattr(fitted.simulated, name)
        off = f"{now / before - 1:+.0%}" if kind == "rate" else ""
        cells = [_cell(fitted.recorded, name, kind), _cell(fitted.simulated, name, kind), off]
        if changed:
            cells.append(_cell(changed, name, kind))
            cells.append(f"{getattr(changed, name) / now - 1:+.0%}" if kind == "rate" else "")
        table.add_row(title, *cells)
    console.print(table)
    if changed:
        rate = expected(fitted, changed, "tokens_per_s")
        console.print(
            f"With {' '.join(overrides)}: {rate:,.0f} trained tokens/s are expected in place of "
            f"{fitted.recorded.tokens_per_s:,.0f}, {60 * expected(fitted, changed, 'versions_per_s'):.2f} "
            f"versions a minute in place of {60 * fitted.recorded.versions_per_s:.2f}.",
            soft_wrap=True,
        )
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def _as_tree(fitted: FittedRun, changed: RunFigures | None, remarks: Sequence[str]) -> dict[str, Any]:
    tree = {
        "recorded": fitted.recorded,
        "simulated": fitted.simulated,
        "workload": fitted.workload,
        "sharing": fitted.sharing,
        "remarks": remarks,
    }
    if changed is not None:
        rates = ("versions_per_s", "trajectories_per_s", "tokens_per_s")
        tree |= {"changed": changed, "expected": {n: expected(fitted, changed, n) for n in rates}}
    found: dict[str, Any] = msgspec.to_builtins(tree)
    return found
