"""`async-rl inspect`: trajectories of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or its name in runs/")
    parser.add_argument(
        "trajectory", nargs="?", metavar="TRAJECTORY", help="an id or its beginning; without, a table"
    )
    table = parser.add_argument_group("the table")
    table.add_argument("--status", choices=("ended", "queued", "trained", "dropped", "failed"))
    table.add_argument("--reason", metavar="TEXT", help="dropped for, or failed with, something like this")
    table.add_argument("--task", metavar="ID", help="of this task")
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
    parser.add_argument("--json", action="store_true", help="print JSON")


def _inspect(parsed: argparse.Namespace) -> int:
    from async_rl.cli.inspection.browse import Filter, inspect

    return inspect(
        parsed.run,
        parsed.trajectory,
        chosen=Filter(
            status=parsed.status,
            reason=parsed.reason,
            task=parsed.task,
            min_reward=parsed.min_reward,
            max_reward=parsed.max_reward,
        ),
        order=parsed.sort,
        limit=parsed.limit,
        special=parsed.special,
        as_json=parsed.json,
    )


INSPECT = Command(
    "inspect",
    "show trajectories of a run",
    "A table of the newest finished ones, or one whole: its segments with engine and weight version, "
    "interruptions, routing, log-probs, reward and history. Reads only; the run may be running.",
    _add_options,
    _inspect,
)
