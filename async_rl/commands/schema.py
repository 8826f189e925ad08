"""`async-rl schema`: every setting."""

from __future__ import annotations

import argparse
import sys

from async_rl.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--markdown", action="store_true", help="as the tables of docs/config.md instead of JSON"
    )


def _schema(parsed: argparse.Namespace) -> int:
    from async_rl import reference

    sys.stdout.write(reference.markdown() if parsed.markdown else reference.json_schema())
    return 0


SCHEMA = Command(
    "schema",
    "print every setting",
    "As a JSON schema, for editors, unless told otherwise.",
    _add_options,
    _schema,
)
