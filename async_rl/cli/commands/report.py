"""`async-rl report`: a run as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from async_rl.cli.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")


def _report(parsed: argparse.Namespace) -> int:
    from async_rl.observability.page.html_report import write_report

    print(write_report(parsed.run_dir, parsed.out))
    return 0


REPORT = Command(
    "report",
    "write a run down as one HTML file with its curves",
    "Works for running, finished and crashed runs. The file needs nothing else: no server, no network.",
    _add_options,
    _report,
)
