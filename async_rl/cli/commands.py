"""The commands of `async-rl`: their arguments, their help texts, and what they start.

`--help` imports this module and must answer at once, so nothing heavy is imported at its top: each command
imports what it needs when it runs. To add a command, write `_add_NAME_options` and the function that it calls
(`_calling`, or `_run_NAME`), and append a `Command` to `COMMANDS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

from async_rl.runtime.printable import print_text


class Command(NamedTuple):
    """One subcommand."""

    name: str
    summary: str
    """One line in `async-rl --help`, without a capital and a full stop."""
    details: str
    """Sentences after it in `async-rl NAME --help`."""
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed options and returns the exit code; `main` prints `AsyncRLError`s."""


def _add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `config` and `overrides`, for `load_config(parsed.config, parsed.overrides)`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see docs/reference/config.md")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="changes to the config; values are YAML, for example rollout.max_staleness=2",
    )


def _calling(function: str, *first: str) -> Callable[[argparse.Namespace], int]:
    """Return what runs a command: a function that gets these options in order, and all others by name."""

    def run(parsed: argparse.Namespace) -> int:
        options = {name: value for name, value in vars(parsed).items() if name != "run_command"}
        arguments = [options.pop(name) for name in first]
        module, _, name = function.partition(":")
        code: int = getattr(import_module(module), name)(*arguments, **options)
        return code

    return run


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument `run`, for `find_run_folder(parsed.run)`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its name in runs/")


# -- train, check, sft ------------------------------------------------------------------------------------


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="SIZE",
        help="memory of a GPU, such as 80GB; exit code 2 if something does not fit",
    )


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--here", action="store_true", help="also check this machine: driver, CUDA toolkit, compile caches"
    )
    parser.add_argument(
        "--resolved", action="store_true", help="also print the config with all defaults, as one YAML file"
    )
    parser.add_argument(
        "--memory", action="store_true", help="instead show the memory of each trainer rank and engine"
    )
    _add_gpu(parser)
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="show the placement on such nodes; default: as this machine, 8 if it has none and the config "
        "asks for cuda",
    )


def _run_check(parsed: argparse.Namespace) -> int:
    from async_rl.cli.memory import show_memory
    from async_rl.cli.plan import describe_interrupts, describe_update
    from async_rl.config import load_config
    from async_rl.errors import ConfigError

    if parsed.gpus_per_node is not None and parsed.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node is {parsed.gpus_per_node}: a node has at least 1")
    if parsed.memory or parsed.gpu is not None:
        config = load_config(parsed.config, parsed.overrides, download_weights=False)
        for line in describe_update(config, parsed.gpus_per_node):
            print_text(line)
        return show_memory(parsed.config, parsed.overrides, parsed.gpu)
    from async_rl.config.reference import resolved_yaml
    from async_rl.data.dataset import load_run_tasks, load_validation, prompt_rule
    from async_rl.run.folder import check_run_folder
    from async_rl.run.identity import check_identity
    from async_rl.run.placement_table import gpus_of_a_node, placement_table
    from async_rl.run.preflight import check_start, check_trainer_here, describe_trainer
    from async_rl.run.reward_trials import try_rewards
    from async_rl.sft.sft_run import check_sft

    config = load_config(parsed.config, parsed.overrides)
    findings: list[str] = []
    trains = config.has_tasks or config.sft.path is None
    if trains:
        findings += [*check_start(config), *describe_trainer(config)]
        check_identity(config, check_run_folder(config), record=False)
        sets = {f"dataset {each.name}": each.tasks for each in load_run_tasks(config).datasets}
        validation = load_validation(config.data, prompt_rule(config)) if config.data.validation else []
        sets |= {f"validation set {each.name}": each.tasks for each in validation}
        findings += try_rewards(config, sets)
    if config.sft.path is not None:
        findings += check_sft(config)
    if trains:
        findings += describe_update(config, parsed.gpus_per_node)
        findings += describe_interrupts(config, parsed.gpus_per_node)
    if gpus := parsed.gpus_per_node or gpus_of_a_node(config):
        findings += placement_table(config, gpus)
    if parsed.here:
        from async_rl.run.this_machine import check_machine, describe_machine

        if trains:
            findings += check_machine(config)
        else:
            check_trainer_here(config)
        findings += describe_machine()
    for finding in findings:
        print_text(f"# {finding}" if parsed.resolved else finding)
    if parsed.resolved:
        print_text(resolved_yaml(config), end="")
    return 0


# -- new-loop ---------------------------------------------------------------------------------------------


def _add_new_loop_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the folder and Python package, such as my_loop")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="D", help="its parent folder; default: the current one"
    )


def _run_new_loop(parsed: argparse.Namespace) -> int:
    from async_rl.cli.new_loop import new_loop

    folder = new_loop(parsed.name, parsed.dir)
    where = "" if parsed.dir == Path() else f"cd {parsed.dir}\n"
    print_text(
        f"wrote {folder}; next:\n\n{where}"
        f"pytest {parsed.name}\n"
        f"async-rl rollout {parsed.name}/config.yaml --n 3 model.path=FOLDER_OF_A_MODEL"
    )
    return 0


# -- plan -------------------------------------------------------------------------------------------------


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--engines", nargs="+", type=int, default=[], metavar="N", help="numbers of engines to compare"
    )
    parser.add_argument("--grow", action="store_true", help="batch and trainer grow with the engines")
    parser.add_argument(
        "--from", dest="run", type=Path, metavar="RUN", help="take figures from a past run's folder, or name"
    )
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="costs of driver and workers: JSON of benchmarks/driver_scale.py; default: measured ones",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    _add_gpu(parser)
    from async_rl.config.description import field_descriptions
    from async_rl.planning.hardware import DEVICES
    from async_rl.planning.planned_job import PlannedRun
    from async_rl.planning.workload import Workload

    parser.add_argument(
        "--hardware",
        choices=DEVICES,
        help="GPU that speeds are computed for; default: H100, if engine.device is cuda",
    )
    for fields in (Workload, PlannedRun):
        types = get_type_hints(fields)
        for name, text in field_descriptions(fields).items():
            if name not in ("shares_prompts", "scale"):  # which benchmarks set
                number = float if float in (types[name], *get_args(types[name])) else int
                parser.add_argument(f"--{name.replace('_', '-')}", type=number, help=text)


def _add_what_if_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="changes to the run's config, for example rollout.max_staleness=3",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


# -- rollout, evaluate, inspect ---------------------------------------------------------------------------


def _add_rollout_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--n", dest="number", type=int, default=5, metavar="N", help="trajectories; default: 5"
    )
    parser.add_argument(
        "--task",
        dest="task_id",
        metavar="ID",
        help="run all of them on this task; default: each on the next task",
    )
    parser.add_argument("--special", action="store_true", help="show special tokens")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print a line of JSON for each trajectory"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write these lines into a file (.jsonl)")


def _add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="Hugging Face folder; default: model.path of the config"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="keep the record and the answers, for async-rl inspect"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the record as JSON")


def _add_inspect_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "trajectory", nargs="?", metavar="TRAJECTORY", help="an id or its beginning; without, a table"
    )
    table = parser.add_argument_group("the table")
    table.add_argument("--status", choices=("ended", "queued", "trained", "dropped", "failed"))
    table.add_argument("--reason", metavar="TEXT", help="the reason or error contains this text")
    table.add_argument("--task", metavar="ID", help="trajectories of this task")
    table.add_argument(
        "--failure",
        choices=("agent_wrong", "tool_broken", "sandbox_lost", "time_over", "context_full", "other"),
        help="attempts that did not succeed for this kind of reason",
    )
    table.add_argument("--min-reward", type=float, metavar="X")
    table.add_argument("--max-reward", type=float, metavar="X")
    table.add_argument(
        "--sort",
        choices=("newest", "longest", "most-interrupted", "reward", "slowest"),
        default="newest",
        help="reward has the worst first; default: newest",
    )
    table.add_argument("--limit", type=int, default=20, metavar="N", help="most lines; 0 for all")
    parser.add_argument("--special", action="store_true", help="show special tokens")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


# -- capture, replay-step, price --------------------------------------------------------------------------


def _add_capture_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest that has been trained")


def _run_capture(parsed: argparse.Namespace) -> int:
    from async_rl.config import load_config
    from async_rl.run.captures import newest_kept_step, write_capture
    from async_rl.run.folder import find_run_folder

    folder = find_run_folder(parsed.run)
    step = newest_kept_step(folder) if parsed.step is None else parsed.step
    config = load_config(folder / "config.yaml")
    print_text(str(write_capture(config, folder, step, "it was requested", requested=True)))
    return 0


def _add_replay_step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("capture", type=Path, metavar="CAPTURE", help="a folder in RUN/captures")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="changes to the run's config, for example trainer.num_ranks=2",
    )
    parser.add_argument(
        "--until",
        choices=("rollout", "step"),
        default="step",
        help="rollout: only verify and show the batch, without a trainer; default: step",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for logs; default: CAPTURE/replay")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON lines")


def _add_price_options(parser: argparse.ArgumentParser) -> None:
    where = "the run's folder, its name in runs/, or a folder in RUN/captures"
    parser.add_argument("run", type=Path, metavar="RUN", help=where)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="changes to the run's config, for example trainer.num_ranks=2",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for logs; default: CAPTURE/price")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


# -- report, export, doctor, schema -----------------------------------------------------------------------


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")


def _run_report(parsed: argparse.Namespace) -> int:
    from async_rl.observability.page.html_report import write_report
    from async_rl.run.folder import find_run_folder
    from async_rl.store.ledger_tables import read_attempts

    run_dir = find_run_folder(parsed.run)
    failures = read_attempts(run_dir / "ledger.sqlite").rows()
    print_text(str(write_report(run_dir, parsed.out, failures)))
    return 0


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="a checkpoint, or a run's folder or its name in runs/: its newest complete one",
    )
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint that trainer.keep_best keeps, not the newest one"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to create")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder with config and tokenizer; default: model.path of the run",
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, metavar="N", help="size of a safetensors file; default: 4 GiB"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="the adapter of trainer.lora alone, in PEFT's format; default: merged into the weights",
    )


def _best_checkpoint(folder: Path) -> Path:
    from async_rl.errors import ConfigError
    from async_rl.trainer_protocol import read_best

    directory = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    best = read_best(directory)
    if best is None or best.step is None:
        raise ConfigError(
            f"--best: {directory} has no checkpoint that was evaluated, or the run has no trainer.keep_best: "
            "name a checkpoint, or leave --best out"
        )
    return directory / f"step_{best.step:08d}"


def _run_export(parsed: argparse.Namespace) -> int:
    from async_rl.errors import ConfigError
    from async_rl.run.folder import find_run_folder
    from async_rl.runtime.loading import load_object

    checkpoint = find_run_folder(parsed.checkpoint)
    if parsed.max_shard_bytes is not None and parsed.max_shard_bytes < 1:
        raise ConfigError(f"--max-shard-bytes is {parsed.max_shard_bytes}, expected at least 1")
    held = (checkpoint.glob(each) for each in ("manifest.json", "step_*", "checkpoints/step_*"))
    if not (checkpoint.name.startswith("step_") or any(map(any, held))):  # loading the exporter takes long
        raise ConfigError(f"there is no checkpoint in {checkpoint}: name a run's folder or a checkpoint")
    if parsed.best:
        checkpoint = _best_checkpoint(checkpoint)
    # By its dotted path: no module of this package imports the trainer.
    export = load_object("trainer.checkpoints.hf_export:export_checkpoint", what="exporter")
    done = export(
        checkpoint,
        parsed.out,
        model=parsed.model,
        max_shard_bytes=parsed.max_shard_bytes,
        adapter=parsed.adapter,
    )
    for flaw in done.skipped_checkpoints:
        print_text(f"skipped: {flaw}")
    what = "adapter" if parsed.adapter else "weights"
    print_text(f"{parsed.out}: the {what} of step {done.step}, from {done.checkpoint}")
    return 0


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="URL|RUN", help="the job's metrics URL, its run folder, or its name in runs/"
    )


def _run_doctor(parsed: argparse.Namespace) -> int:
    from async_rl.errors import EnvironmentNotReady
    from async_rl.observability.discovery import ask_health
    from async_rl.run.folder import find_run_folder

    folder = None if "://" in parsed.job else find_run_folder(Path(parsed.job))
    try:
        text, code = ask_health(parsed.job if folder is None else str(folder))
    except EnvironmentNotReady:
        from async_rl.observability.page.html_report import describe_end

        ended = None if folder is None else describe_end(folder)
        if ended is None:
            raise
        text, code = ended, 0
    print_text(text)
    return code


def _add_schema_options(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--markdown", action="store_true", help="as the tables of docs/reference/config.md instead of JSON"
    )
    shown.add_argument(
        "--metrics", action="store_true", help="every metric, as the page docs/reference/metrics.md"
    )


def _run_schema(parsed: argparse.Namespace) -> int:
    if parsed.metrics:
        from async_rl.cli import metrics_reference

        print_text(metrics_reference.markdown(), end="")
        return 0
    from async_rl.config import reference

    print_text(reference.markdown() if parsed.markdown else reference.json_schema(), end="")
    return 0


COMMANDS: tuple[Command, ...] = (
    Command(
        "new-loop",
        "write a starting point for an agent loop",
        "Creates a folder with a loop, a tool, a reward, a dataset, a config and passing tests.",
        _add_new_loop_options,
        _run_new_loop,
    ),
    Command(
        "sft",
        "train on conversations (supervised), or continue that",
        "Reads the section `sft` of the config; layout, memory and checkpoints are those of `trainer`. "
        "Writes a Hugging Face folder, for model.path of `async-rl train`. The first Ctrl-C writes a "
        "checkpoint.",
        _add_config,
        _calling("async_rl.sft.sft_run:sft", "config", "overrides"),
    ),
    Command(
        "train",
        "run a config to its end, or continue it",
        "The run's files are in <run.dir>/<run.name>. The first Ctrl-C lets running work end and writes "
        "a checkpoint, the second aborts.",
        _add_config,
        _calling("async_rl.cli.train:train", "config", "overrides"),
    ),
    Command(
        "check",
        "say whether a config can work; start nothing",
        "Checks the config, the model's files, every row of the dataset and all dotted paths, and prints "
        "what follows from them; with --resolved also the config. Of a config with sft.path it checks the "
        "conversations, too.",
        _add_check_options,
        _run_check,
    ),
    Command(
        "plan",
        "simulate a config's job and say what to expect of it",
        "Runs the scheduler in virtual time: throughput, idle shares, staleness, memory and the "
        "bottleneck, before there is a machine. Needs neither model nor data; see docs/guide/scaling-up.md.",
        _add_plan_options,
        _calling("async_rl.cli.plan:plan", "config", "overrides"),
    ),
    Command(
        "what-if",
        "predict a past run under other settings",
        "Fits a simulation to the run's record, compares both, and simulates the run's own trajectories "
        "under changed settings of the scheduler. The run may be running; see docs/guide/scaling-up.md.",
        _add_what_if_options,
        _calling("async_rl.cli.what_if:what_if", "run", "overrides"),
    ),
    Command(
        "rollout",
        "try a config's agent loop without training",
        "Starts one engine as the config says, or takes engine.urls or the simulated engine, runs the loop "
        "on the first tasks and shows the trajectories as they end. Exit code 1 when one failed.",
        _add_rollout_options,
        _calling("async_rl.cli.inspection.try_out:rollout", "config", "overrides"),
    ),
    Command(
        "evaluate",
        "answer a config's validation sets with any model",
        "Starts one engine as the config says, or takes engine.urls or the simulated engine, has every task "
        "of data.validation answered evaluation.samples times, and shows reward and pass@k with intervals.",
        _add_evaluate_options,
        _calling("async_rl.cli.evaluate:evaluate", "config", "overrides"),
    ),
    Command(
        "inspect",
        "show trajectories of a run",
        "A table of the newest finished ones, or one in full: its segments with engine and weight version, "
        "interruptions, routing, log-probs, reward and history. Reads only; the run may be running.",
        _add_inspect_options,
        _calling("async_rl.cli.inspection.browse:inspect", "run", "trajectory"),
    ),
    Command(
        "capture",
        "keep a step of a run, to repeat it",
        "Links the batches since the last checkpoint and that checkpoint into RUN/captures. The run may be "
        "running; it captures steps that fail or stand out by itself (trainer.capture_bytes).",
        _add_capture_options,
        _run_capture,
    ),
    Command(
        "replay-step",
        "train a captured step once more and compare it",
        "Starts the trainer's ranks from the capture's checkpoint and trains up to the captured step. Loss, "
        "gradient norm and log-probs must be equal bit for bit, with another layout within 1e-5; exit code 1 "
        "if they are not.",
        _add_replay_step_options,
        _calling("async_rl.cli.replay_step:replay_step", "capture", "overrides"),
    ),
    Command(
        "price",
        "measure what stale tokens are worth, and propose a staleness bound",
        "Starts the trainer's ranks from the newest capture's checkpoint, trains up to the captured step and "
        "compares importance weights and gradients of its tokens by lag. With the throughput that plan "
        "expects at several bounds, it proposes a rollout.max_staleness.",
        _add_price_options,
        _calling("async_rl.cli.price:price", "run", "overrides"),
    ),
    Command(
        "report",
        "write a run down as one HTML file with its curves",
        "Works for running, finished and crashed runs. The file needs nothing else: no server, no network.",
        _add_report_options,
        _run_report,
    ),
    Command(
        "export",
        "write a checkpoint's weights as a Hugging Face folder",
        "Safetensors with config and tokenizer, for transformers, SGLang or model.path. One process reads a "
        "checkpoint of any layout, also of a running run; it needs memory for the weights alone.",
        _add_export_options,
        _run_export,
    ),
    Command(
        "doctor",
        "say what a running job waits for",
        "Prints the chain of waits from the train loop to its likely cause, or when and how the job ended; "
        "exit code 4 if it is stalled.",
        _add_doctor_options,
        _run_doctor,
    ),
    Command(
        "schema",
        "print every setting, or every metric",
        "Prints a JSON schema of the settings, for editors, unless an option selects another format.",
        _add_schema_options,
        _run_schema,
    ),
)
"""In the order of `async-rl --help`, which is that of a day's work."""
