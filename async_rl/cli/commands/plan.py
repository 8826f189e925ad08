"""`async-rl plan`: what to expect of a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from async_rl.cli.commands.command import Command, add_config

_FIGURES = (
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
    ("snapshot-s", float, "seconds in which it stands still to copy them (weights.overlap)"),
    ("train-tokens-per-s", float, "trainer speed; default: 0.9 of a batch's fluid generation time a step"),
    ("train-base-s", float, "seconds of a trainer step of any size"),
    ("routing-row-bytes", int, "of one token; default: what model.path says, when it is there"),
)
"""Flags that are fields of `simulation.workload.Workload`."""

_SIMULATION = (
    ("versions", "steps that are measured"),
    ("warmup", "steps before them"),
    ("seed", "of the lengths"),
    ("coarsen", "real trajectories that one simulated one stands for"),
)
"""Flags that are fields of `simulation.plan.Simulation`."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--engines", nargs="+", type=int, default=[], metavar="N", help="compare so many")
    parser.add_argument("--grow", action="store_true", help="batch and trainer grow with the engines")
    parser.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN_DIR", help="take figures from a past run's folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    for flag, kind, text in _FIGURES:
        parser.add_argument(f"--{flag}", type=kind, help=text)
    for flag, text in _SIMULATION:
        parser.add_argument(f"--{flag}", type=int, help=text)


def _plan(parsed: argparse.Namespace) -> int:
    from async_rl.cli.plan import plan

    def given(flags: Iterable[str]) -> dict[str, Any]:
        values = ((name, getattr(parsed, name)) for name in (flag.replace("-", "_") for flag in flags))
        return {name: value for name, value in values if value is not None}

    return plan(
        parsed.config,
        parsed.overrides,
        engines=parsed.engines,
        grow=parsed.grow,
        run_dir=parsed.run_dir,
        figures=given(flag for flag, *_ in _FIGURES),
        simulation=given(flag for flag, _ in _SIMULATION),
        as_json=parsed.json,
    )


PLAN = Command(
    "plan",
    "simulate a config's job and say what to expect of it",
    "Runs the scheduler in virtual time: throughput, idle shares, staleness, memory and the "
    "bottleneck, before there is a machine. Needs neither model nor data; see docs/guide/scaling-up.md.",
    _add_options,
    _plan,
)
