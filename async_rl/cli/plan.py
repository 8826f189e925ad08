"""`async-rl plan CONFIG`: estimates the throughput of a job before there are machines for it.

`async_rl.planning.planned_job` runs the real scheduler in virtual time. This module is the command around
it: flags and past runs become a `Workload`, plans become a table and a sentence on the bottleneck.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace
from rich.table import Table

from async_rl.cli.memory import show_memory
from async_rl.config import Config, SGLangEngines, load_config
from async_rl.config.worker_count import workers_needed
from async_rl.engines.model_facts import load_facts, read_config
from async_rl.errors import ConfigError
from async_rl.observability.long_work import LongWork
from async_rl.observability.records import step_record_log
from async_rl.observability.text_console import TextConsole
from async_rl.planning.hardware import DEVICES, shape_of, speeds_on
from async_rl.planning.interruption_cost import LEAST_GAIN, describe_interruption, nearest_change
from async_rl.planning.planned_job import JobPlan, PlannedRun, simulate
from async_rl.planning.process_costs import MAX_LOAD, MEASURED_COSTS, ProcessLoad, process_load, read_costs
from async_rl.planning.update_costs import estimate_update
from async_rl.planning.workload import Workload, calibrate, num_engines, with_engines
from async_rl.run.folder import find_run_folder
from async_rl.run.memory_estimate import model_bytes, version_bytes
from async_rl.run.placement_table import gpus_of_a_node
from async_rl.run.preflight import require_tasks
from async_rl.runtime.printable import print_text

S = TypeVar("S", bound=msgspec.Struct)

_MAX_SIMULATED: Final = 2048
"""Simulated trajectories in flight, at most, where `coarsen` is not given: a plan then takes minutes."""

_USUAL: Final = "H100"


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    engines: Sequence[int] = (),
    grow: bool = False,
    run: Path | None = None,
    costs: Path | None = None,
    as_json: bool = False,
    gpu: str | None = None,
    hardware: str | None = None,
    **fields: float | None,
) -> int:
    """Simulate a config's job and print what to expect of it.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        engines: Numbers of engines to compare; none takes the config's. Trajectories in flight grow with it.
        grow: Batches and the trainer grow with the engines too.
        run: A past run, or its name, that speeds and lengths are taken from.
        costs: Measured costs of the driver and of workers, as the benchmark writes them; None takes ours.
        as_json: Print the plans as JSON instead of a table.
        gpu: Size of a GPU such as `80GB`, for a table of the memory before; None prints none.
        hardware: The GPU that speeds are computed for, a key of `DEVICES`; None: an H100, if engines are on
            GPUs.
        fields: Of `Workload` and `PlannedRun`; None leaves a field at its default.

    Returns:
        The exit code: 2 when something does not fit into the GPU's memory.

    Raises:
        ConfigError: The config, the run or a figure cannot be used.
    """
    if gpu is not None and not as_json and (code := show_memory(path, overrides, gpu)):
        return code
    config = load_config(path, overrides, download_weights=False)
    require_tasks(config)
    figures = {name: value for name, value in fields.items() if value is not None}
    simulation = {name: figures.pop(name) for name in PlannedRun.__struct_fields__ if name in figures}
    row_bytes, *remarks = _routing_row_bytes(config)
    if config.rollout.dynamic_filtering:
        remarks.append("rollout.dynamic_filtering is not simulated: groups that it drops take time, too.")
    run_dir = None if run is None else find_run_folder(run)
    workload = workload_for(config, run_dir, {"routing_row_bytes": row_bytes} | figures)
    speeds = {} if run_dir is not None else computed_speeds(config, workload, hardware)
    workload = replace(workload, **{name: speed for name, speed in speeds.items() if name not in figures})
    how = _convert_figures(simulation, PlannedRun)
    base = num_engines(config)
    measured = read_costs(costs or MEASURED_COSTS)
    is_computed = run_dir is None and "sync_s" not in figures
    num_bytes = version_bytes(config) if is_computed else 0
    updates = [f"pause of an update {workload.sync_s:.3g} s"]
    if is_computed:
        updates = [] if num_bytes else [f"{updates[0]}, as model.path does not say the model's size"]
    workloads, plans, loads, sentences, interruptions = [], [], [], [], []
    for number in engines or (base,):
        if num_bytes:
            update = estimate_update(config, workload, num_bytes, number, gpus_of_a_node(config))
            publish_s = figures.get("publish_s", update.publish_s)
            workload = replace(workload, sync_s=update.pause_s, publish_s=publish_s)
            updates.append(str(update._replace(publish_s=0.0) if "publish_s" in figures else update))
        job, work = scaled_job(config, workload, number, grow=grow)
        workloads.append(work)
        if "coarsen" not in simulation:
            how = replace(how, coarsen=coarsening(job))
        title = f"simulating {number:,} engine{'s' * (number != 1)}"
        with LongWork(title, "steps", how.warmup + how.versions) as shown:
            plans.append(simulate(job, work, how, on_step=shown.show_done))
        given = config.rollout.num_workers
        # The config's own number of workers fits its own number of engines only.
        workers = given if isinstance(given, int) and not engines else requested_workers(job)
        nodes = frame_nodes(job, work, workers)
        loads.append(process_load(plans[-1], work, measured, workers, frame_nodes=nodes))
        sentence = process_bottleneck(loads[-1], work) or bottleneck(plans[-1], job, work)
        sentences.append(sentence + queue_remark(plans[-1], job, nodes) + workers_remark(loads[-1]))
        change = nearest_change(job, work)
        if change is not None and len(engines) < 2:  # among several numbers it is only computed
            title = f"simulating {' '.join(change.overrides)}"
            with LongWork(title, "steps", how.warmup + how.versions) as shown:
                changed = simulate(change.config, work, how, on_step=shown.show_done)
            gain = changed.relative / plans[-1].relative
            change = change._replace(gain=gain) if gain >= LEAST_GAIN else None
        interruptions.append(describe_interruption(job, work, change))
    if as_json:
        rows = [
            msgspec.to_builtins(p)
            | msgspec.to_builtins({"workload": w, "processes": q, "bottleneck": s, "interruption": i})
            for p, w, q, s, i in zip(plans, workloads, loads, sentences, interruptions, strict=True)
        ]
        print_text(json.dumps({"plans": rows}, indent=1))
    else:
        of = f" (what is not given is arithmetic for an {hardware or _USUAL})" if speeds else ""
        told = ["\n  ".join([s, *i]) for s, i in zip(sentences, interruptions, strict=True)]
        _show(TextConsole(), _assumptions(workload, updates, of), plans, loads, told, remarks)
    return 0


def describe_update(config: Config, gpus_per_node: int | None) -> list[str]:
    """Return a line on what a weight update is expected to take, if the size of a version is known.

    Args:
        config: The run's config.
        gpus_per_node: As for `estimate_update`; None takes those of this machine.
    """
    num_bytes = version_bytes(config)
    if not num_bytes:
        return []
    gpus = gpus_of_a_node(config) if gpus_per_node is None else gpus_per_node
    update = estimate_update(config, Workload(), num_bytes, num_engines(config), gpus)
    return [f"weights by {config.weights.transport}: {update}"]


def describe_interrupts(config: Config, gpus_per_node: int | None) -> list[str]:
    """Return lines on what the config's way to interrupt calls costs, by arithmetic on a plan's figures.

    Args:
        config: The run's config.
        gpus_per_node: As for `describe_update`.
    """
    rollout = config.rollout
    prompt = max(1, min(Workload().prompt_tokens, rollout.max_context_tokens - rollout.max_new_tokens))
    workload = workload_for(config, None, {"prompt_tokens": prompt})
    speeds, num_bytes = computed_speeds(config, workload), version_bytes(config)
    if speeds and num_bytes:
        gpus = gpus_of_a_node(config) if gpus_per_node is None else gpus_per_node
        update = estimate_update(config, workload, num_bytes, num_engines(config), gpus)
        workload = replace(workload, sync_s=update.pause_s, publish_s=update.publish_s, **speeds)
        lines = describe_interruption(config, workload, nearest_change(config, workload))
    else:
        lines = describe_interruption(config, workload, None, knows_speeds=False)
    assumed = f"prompts of {prompt:,} and answers of {workload.mean_tokens:,.0f} tokens"
    return [f"{line} ({assumed} assumed; async-rl plan takes yours)" for line in lines[:1]] + lines[1:]


def workload_for(config: Config, run_dir: Path | None, given: Mapping[str, float]) -> Workload:
    """Return lengths and speeds: those given, else those of a past run, else the defaults.

    Raises:
        ConfigError: The run has no steps, or a figure is out of range.
    """
    longest = config.rollout.max_new_tokens * int(given.get("turns", 1))
    figures: dict[str, Any] = {
        "max_tokens": longest,
        "mean_tokens": longest / 4,
        "tool_limit_s": config.rollout.tool_timeout_s,
    }
    if config.engine.max_total_tokens is not None:
        figures["cache_tokens"] = config.engine.max_total_tokens
    if run_dir is not None:
        records = step_record_log(run_dir / "metrics.jsonl").read()
        if not records:
            raise ConfigError(
                f"--from {run_dir}: there is no metrics.jsonl with a step in it: name a run folder"
            )
        figures |= calibrate(config, records)
        figures["max_tokens"] = max(longest, *(record.sampled_tokens_max for record in records))
    return _convert_figures(figures | dict(given), Workload)


def computed_speeds(config: Config, workload: Workload, hardware: str | None = None) -> dict[str, float]:
    """Return speeds of a model in bfloat16 as fields of a `Workload`.

    Without `hardware`, nothing if engines need not run on GPUs or `model.path` does not say the model.

    Raises:
        ConfigError: There is no config.json, and `hardware` is given.
    """
    on_gpus = isinstance(config.engine, SGLangEngines) and config.engine.device == "cuda"
    if config.model.dtype != "bfloat16" or not (on_gpus or hardware):
        return {}
    try:
        model = shape_of(read_config(config.model.path), model_bytes(config) // 2)
    except ConfigError:
        if hardware:
            raise
        return {}
    return speeds_on(DEVICES[hardware or _USUAL], model, config, workload)


def scaled_job(config: Config, workload: Workload, number: int, *, grow: bool) -> tuple[Config, Workload]:
    """Return the same job on another number of engines, with as many trajectories for each.

    Raises:
        ConfigError: The number is below 1.
    """
    if number < 1:
        raise ConfigError(f"--engines {number}: expected at least 1")
    base = num_engines(config)

    def times(quantity: int) -> int:
        return max(1, round(quantity * number / base))

    concurrent = times(config.rollout.max_concurrent_trajectories)
    rollout = replace(config.rollout, max_concurrent_trajectories=concurrent)
    job = replace(with_engines(config, number), rollout=rollout)
    if not grow:
        return job, workload
    batch = times(config.trainer.groups_per_batch)
    updates = min(batch, config.trainer.updates_per_batch)
    if workload.train_tokens_per_s is not None:
        workload = replace(workload, train_tokens_per_s=workload.train_tokens_per_s * number / base)
    trainer = replace(job.trainer, groups_per_batch=batch, updates_per_batch=updates)
    return replace(job, trainer=trainer), workload


def requested_workers(job: Config) -> int:
    """Return the number of rollout workers that `rollout.num_workers: auto` has for a job."""
    concurrent = job.rollout.max_concurrent_trajectories
    return workers_needed(concurrent, one_machine=not job.placement.joins).number


def coarsening(*jobs: Config, max_simulated: int = _MAX_SIMULATED) -> int:
    """Return how many real trajectories a simulated one stands for by default, a power of 2.

    Batches divide by it, and an engine keeps two slots: with one it would never have a slot to refill.

    Args:
        jobs: They are simulated equally coarsely.
        max_simulated: The number of simulated trajectories in flight that none should exceed.
    """
    slots = min(job.engine.max_running_requests for job in jobs)
    batch = math.gcd(*(job.trainer.groups_per_batch for job in jobs))
    in_flight = max(job.rollout.max_concurrent_trajectories for job in jobs)
    coarsen = 1
    while in_flight > max_simulated * coarsen and batch % (2 * coarsen) == 0 and 4 * coarsen <= slots:
        coarsen *= 2
    return coarsen


def bottleneck(plan: JobPlan, config: Config, workload: Workload) -> str:
    """Return one sentence that names the bottleneck of a job and what to change."""
    busy = 1 - plan.trainer_idle
    losses = {
        "empty": plan.engines_empty,
        "prefill": plan.engines_prefill,
        "paused": plan.engines_still,
    }
    worst = max(losses, key=lambda name: losses[name])
    slots = plan.engines * plan.slots
    waits_for_syncs = plan.trainer_syncs > 0.05 and plan.trainer_syncs > plan.trainer_waits
    if waits_for_syncs and not config.weights.overlap and config.rollout.max_staleness:
        return (
            f"Weight updates, for the trainer: it pauses {plan.trainer_syncs:.0%} of the time until "
            "engines have its weights; weights.overlap=true sends them while the next step runs."
        )
    if plan.trainer_waits < 0.02 and busy > 0.8:
        return (
            f"The trainer: it trains {busy:.0%} of the time and batches wait for it; add trainer ranks, or "
            f"save engines (their slots are {plan.engines_empty:.0%} empty)."
        )
    if losses[worst] < 0.05:
        return (
            f"The engines, which are busy: they deliver {plan.relative:.0%} of their throughput; add "
            f"engines, as the trainer is idle {plan.trainer_idle:.0%} of the time."
        )
    if worst == "paused":
        return (
            f"Weight updates: engines are paused {plan.engines_still:.0%} of the time; make updates faster, "
            "or versions larger (trainer.groups_per_batch)."
        )
    if worst == "prefill":
        remedy = (
            "interrupt in_place, which keeps the KV cache (weights.interrupt)"
            if config.weights.interrupt != "in_place"
            else "shorten prompts and tool results, or let calls of a trajectory find their prefix"
        )
        return f"Prefills: they take {plan.engines_prefill:.0%} of the engines' time; {remedy}."
    concurrent = config.rollout.max_concurrent_trajectories
    if concurrent < slots:
        return (
            f"Concurrency: {concurrent} trajectories for {slots} slots leave {plan.engines_empty:.0%} of the "
            f"engines' capacity empty; raise rollout.max_concurrent_trajectories to {slots}."
        )
    if plan.admission_closed > 0.05:
        longest_s = workload.max_tokens * (workload.decode_base_s + workload.decode_per_call_s * plan.slots)
        version_s = plan.groups_per_batch * config.rollout.group_size / plan.trajectories_per_s
        return (
            f"The staleness bound: admission is closed {plan.admission_closed:.0%} of the time, for the "
            f"longest answer takes {longest_s / version_s:.1f} versions; raise rollout.max_staleness above "
            f"{plan.max_staleness}, or trainer.groups_per_batch."
        )
    if workload.tool_s:
        return (
            f"Tools: slots are {plan.engines_empty:.0%} empty while trajectories wait for them; raise "
            "rollout.max_concurrent_trajectories further above the slots."
        )
    return (
        f"Uneven engines: slots are {plan.engines_empty:.0%} empty though trajectories are enough; raise "
        "rollout.max_concurrent_trajectories a little above the slots."
    )


def process_bottleneck(load: ProcessLoad, workload: Workload) -> str:
    """Return a sentence for each of driver, workers, network and disk that limits a job, the fullest first.

    Driver and workers limit it above `MAX_LOAD` of a core, because calls then wait for them; network and disk
    above what a node has. Nothing if none does.
    """
    used = {
        "driver": (load.driver_load, MAX_LOAD),
        "workers": (load.worker_load, MAX_LOAD),
        "network": (load.network_bytes_per_s / workload.network_bytes_per_s, 1.0),
        "disk": (load.disk_bytes_per_s / workload.disk_bytes_per_s, 1.0),
    }
    fullness = {name: share / most for name, (share, most) in used.items() if share > most}
    limits = sorted(fullness, key=fullness.__getitem__, reverse=True)
    return " ".join(_limit_sentence(name, load, workload) for name in limits)


def _limit_sentence(name: str, load: ProcessLoad, workload: Workload) -> str:
    if name == "driver":
        demand = _cpu_demand(load.driver_load)
        if not load.workers:
            return f"The driver: it would {demand}; set rollout.num_workers to at least 1."
        delivered = f": it delivers {1 / load.driver_load:.0%} of this throughput" * (load.driver_load > 1)
        return (
            f"The driver: with {load.workers} rollout workers it would {demand}{delivered}; make answers "
            "longer, use fewer engines, or split the job into several runs."
        )
    if name == "workers":
        enough = math.ceil(load.workers * load.worker_load / MAX_LOAD)
        return (
            f"The rollout workers: each of the {load.workers} would {_cpu_demand(load.worker_load)}; raise "
            f"rollout.num_workers to {enough}."
        )
    if name == "network":
        return (
            f"The network: a process would receive {_size(int(load.network_bytes_per_s))} per second, and a "
            f"node has {_size(int(workload.network_bytes_per_s))}; raise rollout.num_workers, or leave out "
            "routing rows (routing.replay)."
        )
    where, remedy = "The disk of each node with frames", "use more nodes for rollout workers, faster drives"
    if load.frame_nodes == 1:
        where = "The disk of the run folder"
        remedy = "keep frames on the nodes of rollout workers (queue.spool_dir), use faster drives"
    return (
        f"{where}: it would take {_size(int(load.disk_bytes_per_s))} per second of "
        f"{_size(int(workload.disk_bytes_per_s))}; {remedy}, or leave out routing rows (routing.replay)."
    )


def _cpu_demand(load: float) -> str:
    if load > 1:
        return f"need {load:.1f} s of CPU time per second, and has 1"
    return f"use {load:.0%} of a CPU, and above {MAX_LOAD:.0%} calls wait for it"


def workers_remark(load: ProcessLoad) -> str:
    """Return a sentence that says how many rollout workers to request, and what they use."""
    if not load.workers:
        return " No rollout workers are needed for its tokens." * (load.driver_load <= MAX_LOAD)
    cpus = f"each uses {load.worker_load:.0%} of a CPU"
    setting = f"rollout.num_workers={load.workers}"
    asked = f"Request {setting}" if load.worker_load <= MAX_LOAD else f"With {setting}"
    return f" {asked}: {cpus}, the driver {load.driver_load:.0%} of one."


def frame_nodes(job: Config, workload: Workload, workers: int) -> int:
    """Return how many nodes keep frames, if workers are spread over as many nodes as the engines need."""
    if job.queue.spool_dir is None or not workers:
        return 1
    return min(workers, math.ceil(num_engines(job) / workload.engines_per_node))


def queue_remark(plan: JobPlan, config: Config, nodes: int = 1) -> str:
    """Return a sentence if the queue needs more than `queue.max_bytes` on each node, else nothing."""
    on_each = plan.queue_bytes_peak / nodes
    if on_each <= config.queue.max_bytes:
        return ""
    place = f" on each of {nodes} nodes" * (nodes > 1)
    return (
        f" Finished groups take up to {_size(int(on_each))}{place}: with queue.max_bytes = "
        f"{_size(config.queue.max_bytes)} admission would wait for space."
    )


def _convert_figures(figures: Mapping[str, Any], kind: type[S]) -> S:
    for name, figure in figures.items():
        if figure is not None and not math.isfinite(figure):
            raise ConfigError(f"plan: {name} is {figure}, expected a finite number")
    try:
        return msgspec.convert(figures, kind)
    except msgspec.ValidationError as error:
        expected, _, name = str(error).removesuffix("`").partition(" - at `$.")
        found = f"{name} is {figures[name]}: " if name else ""
        raise ConfigError(f"plan: {found}{expected}") from error


def _routing_row_bytes(config: Config) -> tuple[int, str]:
    """Return the bytes of one token's routing if the model is available; else 0 and a remark."""
    if not config.routing.from_engine:
        return 0, ""
    try:
        facts = load_facts(config.model.path)
    except ConfigError as error:
        return 0, f"Routing rows are counted only as --routing-row-bytes says: {error}"
    return len(facts.moe_layers) * facts.top_k * (1 if facts.num_experts <= 256 else 2), ""


def _show(
    console: TextConsole,
    assumptions: str,
    plans: Sequence[JobPlan],
    loads: Sequence[ProcessLoad],
    sentences: Sequence[str],
    remarks: Sequence[str],
) -> None:
    table = Table(title="what to expect", title_justify="left")
    table.add_column("engines")
    for plan in plans:
        table.add_column(f"{plan.engines:,}", justify="right")
    for name, cells in table_rows(plans) + load_rows(loads):
        table.add_row(name, *cells)
    console.print(assumptions, soft_wrap=True)
    console.print(table)
    for plan, sentence in zip(plans, sentences, strict=True):
        console.print(f"{plan.engines:,} engines: {sentence}", soft_wrap=True)
    for remark in filter(None, remarks):
        console.print(remark, soft_wrap=True)


def table_rows(plans: Sequence[JobPlan]) -> list[tuple[str, list[str]]]:
    """Return the lines of the table: a name, and a cell for each plan."""
    return [
        ("slots of an engine", [f"{p.slots}" for p in plans]),
        ("calls that its cache holds", [_calls(p.cached_calls) for p in plans]),
        ("calls that it decodes, mean", [_calls(p.running_calls) for p in plans]),
        ("retractions per trajectory", [f"{p.retracted:.2f}" for p in plans]),
        ("groups in a batch", [f"{p.groups_per_batch:,}" for p in plans]),
        ("trained trajectories/s", [f"{p.trajectories_per_s:,.2f}" for p in plans]),
        ("trained tokens/s", [f"{p.tokens_per_s:,.0f}" for p in plans]),
        ("of the fluid bound", [f"{p.relative:.3f}" for p in plans]),
        ("trainer idle", [f"{p.trainer_idle:.1%}" for p in plans]),
        ("  waiting for a batch", [f"{p.trainer_waits:.1%}" for p in plans]),
        ("  during weight updates", [f"{p.trainer_syncs:.1%}" for p in plans]),
        ("engines: empty slots", [f"{abs(p.engines_empty):.1%}" for p in plans]),
        ("engines: prefilling", [f"{p.engines_prefill:.1%}" for p in plans]),
        ("engines: paused", [f"{p.engines_still:.1%}" for p in plans]),
        ("staleness mean / p99 / max", [_staleness(p) for p in plans]),
        ("staleness bound", [f"{p.max_staleness}" for p in plans]),
        ("dropped", [f"{p.dropped:.1%}" for p in plans]),
        ("tokens masked for age", [f"{p.masked:.1%}" for p in plans]),
        ("prefilled over sampled tokens", [f"{p.prefilled:.3f}" for p in plans]),
        ("KS distance of lengths", [f"{p.ks_lengths:.3f}" for p in plans]),
        ("queue, mean / peak", [f"{_size(p.queue_bytes)} / {_size(p.queue_bytes_peak)}" for p in plans]),
        ("a packed batch", [_size(p.batch_bytes) for p in plans]),
    ]


def load_rows(loads: Sequence[ProcessLoad]) -> list[tuple[str, list[str]]]:
    """Return the lines of the table about the driver, workers, network and disk."""
    return [
        ("rollout workers", [f"{load.workers:,}" for load in loads]),
        ("driver CPU a second", [f"{load.driver_load:.3f} s" for load in loads]),
        ("CPU a second of a worker", [f"{load.worker_load:.3f} s" for load in loads]),
        ("received a second by one process", [_size(int(load.network_bytes_per_s)) for load in loads]),
        ("nodes with frames", [f"{load.frame_nodes:,}" for load in loads]),
        ("written a second by each", [_size(int(load.disk_bytes_per_s)) for load in loads]),
    ]


def _assumptions(w: Workload, updates: Sequence[str], of: str = "") -> str:
    answers = (
        f"answers of {w.mean_tokens:,.0f} tokens"
        if w.sigma == 0
        else f"answers lognormal, mean {w.mean_tokens:,.0f}, sigma {w.sigma}, cut at {w.max_tokens:,}"
    )
    tool = f"after {w.tool_s} s" + f" in the mean, sigma {w.tool_sigma}" * (w.tool_sigma > 0)
    tool += f", {w.tool_limit_s} s at most" * (w.tool_limit_s is not None)
    turns = f", in {w.turns} turns with {w.tool_tokens} tokens of a tool {tool}" * (w.turns > 1)
    copying = f", copying {w.snapshot_s:.3g} s" * (w.snapshot_s > 0)
    trainer = (
        "a step takes 0.9 of its fluid generation time"
        if w.train_tokens_per_s is None
        else f"trainer {w.train_tokens_per_s:,.0f} tokens/s"
    )
    return (
        f"Assumed: prompts of {w.prompt_tokens:,} tokens; {answers}{turns}; a decode step of "
        f"{w.decode_base_s * 1e3:.3g} + {w.decode_per_call_s * 1e3:.3g} · calls ms; prefill "
        f"{w.prefill_tokens_per_s:,.0f} tokens/s; {trainer}{of}; publishing {w.publish_s:.3g} s{copying}, "
        f"{' to '.join(dict.fromkeys(updates))}; {w.routing_row_bytes} bytes of routing rows a token."
    )


def _calls(number: float | None) -> str:
    return "all" if number is None else f"{number:,.1f}"


def _staleness(plan: JobPlan) -> str:
    return f"{plan.staleness_mean:.1f} / {plan.staleness_p99} / {plan.staleness_max}"


def _size(nbytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes //= 1000
    return f"{nbytes:,} {unit}"
