"""`async-rl rollout`: try an agent loop without training."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command, add_config


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--n", type=int, default=5, metavar="N", help="trajectories; default: 5")
    parser.add_argument("--task", metavar="ID", help="all of this task; default: each of the next task")
    parser.add_argument("--special", action="store_true", help="show special tokens")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each trajectory")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write these lines into a file (.jsonl)")


def _rollout(parsed: argparse.Namespace) -> int:
    from async_rl.cli.inspection.try_out import rollout

    return rollout(
        parsed.config,
        parsed.overrides,
        number=parsed.n,
        task_id=parsed.task,
        special=parsed.special,
        as_json=parsed.json,
        save=parsed.save,
    )


ROLLOUT = Command(
    "rollout",
    "try a config's agent loop without training",
    "Starts one engine as the config says, or takes engine.urls or the simulated engine, runs the loop on "
    "the first tasks and shows the trajectories as they end. Exit code 1 when one failed.",
    _add_options,
    _rollout,
)
