"""The command line: `async-rl train | check | plan | doctor | schema`.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once. What goes wrong
ends here, as one sentence on stderr and an exit code: 0 done, 1 a service failed, 2 the config cannot work, 3
the environment is not ready, 4 the run stood still, 130 and 143 stopped by Ctrl-C or SIGTERM. The traceback
is in the run's log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from async_rl import __version__
from async_rl.errors import AsyncRLError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program; None takes the process's own.

    Returns:
        The exit code.
    """
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "schema":
            return _schema(parsed.markdown)
        if parsed.command == "check":
            return _check(parsed.config, parsed.overrides)
        if parsed.command == "plan":
            return _plan(parsed)
        if parsed.command == "doctor":
            return _doctor(parsed.job)
        from async_rl.train import train

        return train(parsed.config, parsed.overrides)
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Fully-async reinforcement learning of MoE language models with partial rollouts.",
        epilog="Exit codes: 0 done, 1 a service failed, 2 the config cannot work, 3 the environment is not "
        "ready, 4 the run stood still, 130 or 143 stopped by a signal.",
    )
    parser.add_argument("--version", action="version", version=f"async-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text, more in (
        (
            "train",
            "run a config to its end, or continue it",
            "The run's files are in <run.dir>/<run.name>. The first Ctrl-C lets running work end and writes "
            "a checkpoint, the second aborts.",
        ),
        (
            "check",
            "say whether a config can work; start nothing",
            "Checks the config, the model's folder, every row of the dataset and all dotted paths, and "
            "prints the resolved config with the bounds that follow from it.",
        ),
        (
            "plan",
            "simulate a config's job and say what to expect of it",
            "Runs the scheduler in virtual time: throughput, idle shares, staleness, memory and the "
            "bottleneck, before there is a machine. Needs neither model nor data; see docs/scaling.md.",
        ),
    ):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}. {more}")
        command.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see docs/config.md")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="dotted.key=value",
            help="changes to the config; values are YAML, for example rollout.max_staleness=2",
        )
        if name == "plan":
            _add_plan_options(command)
    text = "say what a running job waits for"
    more = (
        "Prints the chain of waits from the train loop to its likely cause; exit code 4 if it stands still."
    )
    doctor = commands.add_parser("doctor", help=text, description=f"{text.capitalize()}. {more}")
    doctor.add_argument("job", metavar="URL|RUN_DIR", help="the job's metrics URL, or its run folder")
    schema = commands.add_parser("schema", help="print every setting as JSON schema")
    schema.add_argument("--markdown", action="store_true", help="as the tables of docs/config.md instead")
    return parser


_PLAN_FIGURES = (
    ("prompt-tokens", int, "tokens of a prompt"),
    ("mean-tokens", float, "mean of a lognormal answer before it is cut; default: a quarter of the longest"),
    ("sigma", float, "standard deviation of its logarithm; 0 makes all answers equal"),
    ("max-tokens", int, "longest answer; default: rollout.max_new_tokens for each turn"),
    ("turns", int, "turns of an answer"),
    ("tool-tokens", int, "tokens read between two turns"),
    ("tool-s", float, "seconds between two turns"),
    ("decode-base-s", float, "seconds of a decode step, beside ..."),
    ("decode-per-call-s", float, "... these for each running call"),
    ("prefill-tokens-per-s", float, "prefill speed of an engine"),
    ("sync-s", float, "an engine's standstill in a weight update, seconds"),
    ("publish-s", float, "seconds in which the trainer writes weights while engines go on"),
    ("train-tokens-per-s", float, "trainer speed; default: 0.9 of a batch's fluid generation time a step"),
    ("train-base-s", float, "seconds of a trainer step of any size"),
    ("routing-row-bytes", int, "of one token; default: what model.path says, when it is there"),
)
"""Flags of `plan` that are fields of `simulation.workload.Workload`."""

_PLAN_SIMULATION = (
    ("versions", "steps that are measured"),
    ("warmup", "steps before them"),
    ("seed", "of the lengths"),
    ("coarsen", "real trajectories that one simulated one stands for"),
)
"""Flags that are fields of `simulation.plan.Simulation`."""


def _add_plan_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engines", nargs="+", type=int, default=[], metavar="N", help="compare so many")
    command.add_argument("--grow", action="store_true", help="batch and trainer grow with the engines")
    command.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN_DIR", help="take figures from a past run's folder"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    for flag, kind, text in _PLAN_FIGURES:
        command.add_argument(f"--{flag}", type=kind, help=text)
    for flag, text in _PLAN_SIMULATION:
        command.add_argument(f"--{flag}", type=int, help=text)


def _plan(parsed: argparse.Namespace) -> int:
    from async_rl.plan import plan

    def given(flags: Iterable[str]) -> dict[str, Any]:
        values = ((name, getattr(parsed, name)) for name in (flag.replace("-", "_") for flag in flags))
        return {name: value for name, value in values if value is not None}

    return plan(
        parsed.config,
        parsed.overrides,
        engines=parsed.engines,
        grow=parsed.grow,
        run_dir=parsed.run_dir,
        figures=given(flag for flag, *_ in _PLAN_FIGURES),
        simulation=given(flag for flag, _ in _PLAN_SIMULATION),
        as_json=parsed.json,
    )


def _schema(markdown: bool) -> int:
    from async_rl import reference

    sys.stdout.write(reference.markdown() if markdown else reference.json_schema())
    return 0


def _doctor(job: str) -> int:
    from async_rl.checkup import checkup

    text, code = checkup(job)
    print(text)
    return code


def _check(path: Path, overrides: Sequence[str]) -> int:
    from async_rl.config import load_config
    from async_rl.preflight import check
    from async_rl.reference import resolved_yaml

    config = load_config(path, overrides)
    findings = check(config)
    sys.stdout.write(resolved_yaml(config))
    for finding in findings:
        print(f"# {finding}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
