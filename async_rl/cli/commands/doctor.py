"""`async-rl doctor`: why a running job does not move."""

from __future__ import annotations

import argparse

from async_rl.cli.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="URL|RUN_DIR", help="the job's metrics URL, or its run folder")


def _doctor(parsed: argparse.Namespace) -> int:
    from async_rl.cli.checkup import checkup

    text, code = checkup(parsed.job)
    print(text)
    return code


DOCTOR = Command(
    "doctor",
    "say what a running job waits for",
    "Prints the chain of waits from the train loop to its likely cause; exit code 4 if it stands still.",
    _add_options,
    _doctor,
)
