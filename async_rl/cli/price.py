"""`async-rl price RUN`: what stale tokens of a captured step are worth, and the bound that gives the most.

```
capture ─► ranks, from the checkpoint ─► each step before the captured one, as `replay-step` does
        ─► its batch is measured by lag, no weight changes ─► price of each lag
record of the run ─► simulated at several bounds             ─► effective tokens per second, a proposal
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.table import Table

from async_rl.cli.plan import coarsening, workload_for
from async_rl.cli.replay_step import (
    OpenTrainer,
    checkpoint_of,
    config_of_replay,
    load_batches,
    repeat_step,
    start_trainer,
)
from async_rl.cli.what_if import check_expressible
from async_rl.config import Config, load_config
from async_rl.errors import ConfigError
from async_rl.planning.past_run import read_past_run
from async_rl.planning.planned_job import JobPlan, PlannedRun, simulate
from async_rl.planning.run_fit import fit_run, recorded_tasks
from async_rl.planning.staleness_price import (
    BoundPrice,
    LagPrice,
    Proposal,
    price_bounds,
    price_lags,
    propose_bound,
)
from async_rl.planning.workload import num_engines, with_engines
from async_rl.run.captures import FOLDER, MANIFEST, load_capture
from async_rl.run.folder import find_run_folder, result_folder, run_console, run_in_folder
from async_rl.run.preflight import check_trainer
from async_rl.runtime.printable import print_text
from async_rl.store.kept_batches import kept_steps, step_folder
from async_rl.trainer_protocol import LagMeasurement

BOUNDS: Final = (0, 1, 2, 4, 8)
"""The bounds that are compared with each other and with the run's own."""

_MAX_SIMULATED: Final = 128
"""Simulated trajectories in flight, at most: a bound then takes seconds, whatever the size of the job."""

_VERSIONS: Final = 8
"""Steps that are simulated after the warm-up."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What `async-rl price --json` prints."""

    capture: str
    step: int
    lags: list[LagPrice]
    unknown_tokens: int
    """Trained tokens whose lag is not known; in no price."""
    bounds: list[BoundPrice] = []
    """Empty if the job cannot be simulated, or the step has tokens of one lag only."""
    proposal: Proposal | None = None
    remarks: list[str] = []


def price(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    as_json: bool = False,
    open_trainer: OpenTrainer = start_trainer,
) -> int:
    """Measure what the tokens of a captured step are worth by lag, and propose a staleness bound.

    Args:
        run: A run, or its name, whose newest capture is measured; or the folder of a capture.
        overrides: `dotted.key=value` changes to the run's config, such as another layout.
        out: Where logs go; None: into the capture.
        as_json: Print JSON.
        open_trainer: Starts the ranks.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no capture, or its config cannot work.
        DataError: Batches are missing or damaged.
    """
    path = find_capture(run)
    capture = load_capture(path)
    config = config_of_replay(load_config(path / "config.yaml", overrides))
    check_trainer(config, config.trainer.worker, "trainer.worker")
    *before, measured_step = load_batches(path, capture).items()
    checkpoint = checkpoint_of(path, capture)
    console = run_console()

    def say(line: str) -> None:
        if not as_json:
            console.print(line, soft_wrap=True)

    async def measure(folder: Path, stop: asyncio.Event) -> LagMeasurement:
        start = f"the checkpoint of step {capture.base_step}" if checkpoint else config.model.path
        say(f"step {capture.step} of {capture.run}, captured because {capture.reason}")
        say(f"starting {config.trainer.num_ranks} trainer ranks from {start}; logs in {folder / 'logs'}")
        async with open_trainer(config, folder) as trainer:
            await trainer.setup(checkpoint)
            for step, batch in before:
                say(f"step {step}: {', '.join(map(str, await repeat_step(trainer, path, batch, step)))}")
            return await trainer.measure_lags(measured_step[1])

    def finish(folder: Path, measured: LagMeasurement) -> int:
        prices = _priced(path, overrides, measured)
        if as_json:
            print_text(msgspec.json.encode(prices).decode())
            return 0
        console.print(_lag_table(prices.lags))
        if prices.bounds:
            console.print(_bound_table(prices.bounds))
        for line in prices.remarks:
            say(line)
        return 0

    return run_in_folder(result_folder(out or path / "price", config), config, measure, finish=finish)


def find_capture(run: Path) -> Path:
    """Return a capture, or the newest one of a run.

    Raises:
        ConfigError: There is none.
    """
    if (run / MANIFEST).is_file():
        return run
    folder = find_run_folder(run)
    captures = [step_folder(folder / FOLDER, step) for step in kept_steps(folder / FOLDER)]
    if not captures:
        raise ConfigError(
            f"{folder} has no capture: `async-rl capture {run}` makes one of the newest trained step, also "
            "of a running run, if its batch is kept (trainer.capture_bytes)"
        )
    return max(captures, key=lambda path: load_capture(path).unix_s)


def _priced(path: Path, overrides: Sequence[str], measured: LagMeasurement) -> Prices:
    """Return the prices of lags, and if possible those of bounds."""
    capture = load_capture(path)
    prices = Prices(
        capture=str(path),
        step=capture.step,
        lags=price_lags(measured),
        unknown_tokens=measured.unknown_tokens,
    )
    if len(prices.lags) < 2:
        lags = ", ".join(str(each.lag) for each in prices.lags) or "unknown"
        remark = (
            f"No bound is proposed: all tokens of step {capture.step} have one lag ({lags}). Capture a step "
            "that has fresh and stale ones, with a larger rollout.max_staleness if it is 0."
        )
        return msgspec.structs.replace(prices, remarks=[remark])
    try:
        plans, refused = simulated_bounds(path / "config.yaml", overrides, Path(capture.run))
    except ConfigError as error:
        return msgspec.structs.replace(prices, remarks=[f"No bound is proposed: {error}"])
    bounds, proposal = price_bounds(measured, plans), propose_bound(measured, plans)
    own = load_config(path / "config.yaml", overrides).rollout.max_staleness
    remarks = [*refused, *_remarks(prices.lags[-1].lag, bounds, proposal, own)]
    return msgspec.structs.replace(prices, bounds=bounds, proposal=proposal, remarks=remarks)


def simulated_bounds(path: Path, overrides: Sequence[str], run: Path) -> tuple[dict[int, JobPlan], list[str]]:
    """Simulate a run's job with each bound: its own trajectories if it has kept them, else such as its steps.

    Returns:
        The plans, and what limits them.

    Raises:
        ConfigError: The run has no steps to take speeds from.
    """
    own = load_config(path, overrides)
    how = PlannedRun(versions=_VERSIONS, coarsen=coarsening(own, max_simulated=_MAX_SIMULATED))
    plans: dict[int, JobPlan] = {}
    remarks, fitted = [], None
    try:
        past = read_past_run(run)
        check_expressible(past)
        fitted = fit_run(past, how)
    except ConfigError as error:
        remarks.append(f"Speeds and lengths are taken from the means of its steps only: {error}")
    workload = workload_for(own, run, {}) if fitted is None else fitted.workload
    for bound in sorted({*BOUNDS, own.rollout.max_staleness}):
        try:
            job: Config = load_config(path, [*overrides, f"rollout.max_staleness={bound}"])
        except ConfigError as error:
            remarks.append(f"A bound of {bound} is left out: {error}")
            continue
        if fitted is None:
            plans[bound] = simulate(job, workload, how)
        else:
            job = with_engines(job, num_engines(past.config))
            tasks = recorded_tasks(past, job, workload, how)
            plans[bound] = simulate(job, workload, how, tasks=tasks, sharing=fitted.sharing)
    return plans, remarks


def _remarks(oldest: int, bounds: Sequence[BoundPrice], proposal: Proposal, own: int) -> list[str]:
    """Return what the prices say, and how sure it is; `oldest` is the largest lag of the step."""
    by_bound = {each.bound: each for each in bounds}
    best, current = by_bound[proposal.bound], by_bound[own]
    gain = best.effective_tokens_per_s / current.effective_tokens_per_s
    compared = f", {gain:.2f} times those of the run's {own}" if own != best.bound else ", as in the run"
    said = [
        f"Proposed: rollout.max_staleness={best.bound}, with {_rate(best)} effective tokens/s{compared}: "
        f"{best.tokens_per_s:,.0f} trained, each worth {best.worth:.3f} fresh ones."
    ]
    if proposal.is_sure:
        said.append("The proposal is the same without any part of the groups.")
    elif proposal.without_a_part:
        others = sorted(set(proposal.without_a_part))
        said.append(
            "This is not sure: without one part of the groups after the other, the proposals are "
            f"{', '.join(map(str, others))}. Price more steps, or steps with more groups."
        )
    else:
        said.append("How sure this is cannot be said of a single group.")
    if best.extrapolated > 0.01:
        said.append(
            f"{best.extrapolated:.0%} of the tokens of that bound have lags that the step has none of (it "
            f"ends at {oldest}): their worth is extrapolated. Run with it for a while, and price again."
        )
    return said


def _lag_table(lags: Sequence[LagPrice]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    names = ("lag", "tokens", "sample share", "KL, nats", "gradient norm", "direction")
    for name in (*names, "worth", "cosine to freshest", "cosine of halves"):
        table.add_column(name, justify="right")
    for each in lags:
        error = "" if each.direction_error is None else f" ± {each.direction_error:.3f}"
        table.add_row(
            str(each.lag),
            f"{each.tokens:,}",
            f"{each.sample_share:.4f}",
            f"{each.kl_nats:.2e}",
            f"{each.norm:.3g}",
            _or_dash(each.direction) + error,
            f"{each.worth:.3f}",
            _or_dash(each.cosine),
            _or_dash(each.halves),
        )
    return table


def _bound_table(bounds: Sequence[BoundPrice]) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("bound", "trained tokens/s", "mean lag", "worth", "effective tokens/s", "extrapolated"):
        table.add_column(name, justify="right")
    for each in bounds:
        table.add_row(
            str(each.bound),
            f"{each.tokens_per_s:,.0f}",
            f"{each.mean_lag:.2f}",
            f"{each.worth:.3f}",
            _rate(each),
            f"{each.extrapolated:.0%}",
        )
    return table


def _rate(each: BoundPrice) -> str:
    error = "" if each.error is None else f" ± {each.error:,.0f}"
    return f"{each.effective_tokens_per_s:,.0f}{error}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
