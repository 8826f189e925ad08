"""What a command of the command line is.

A new one: a file here with a `Command`, and its line in the table of `async_rl/cli/main.py`. Files here
import nothing heavy at their top, for all of them are imported to print `--help`; `run` imports what it
needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """One subcommand.

    Example:
        >>> GREET = Command("greet", "say hello", "Says it on stdout.", add_options, run)
    """

    name: str
    summary: str
    """One line in `async-rl --help`, without a capital and a full stop."""
    details: str
    """Sentences after it in `async-rl NAME --help`."""
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed options, returns the exit code; errors of ours are printed by the caller."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `config` and `overrides`, for `load_config(parsed.config, parsed.overrides)`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see docs/reference/config.md")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="dotted.key=value",
        help="changes to the config; values are YAML, for example rollout.max_staleness=2",
    )
