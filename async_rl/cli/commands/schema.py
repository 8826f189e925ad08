"""`async-rl schema`: every setting, or every metric."""

from __future__ import annotations

import argparse
import sys

from async_rl.cli.commands.command import Command


def _add_options(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--markdown", action="store_true", help="as the tables of docs/reference/config.md instead of JSON"
    )
    shown.add_argument(
        "--metrics", action="store_true", help="every metric, as the page docs/reference/metrics.md"
    )


def _schema(parsed: argparse.Namespace) -> int:
    if parsed.metrics:
        from async_rl.cli import metrics_reference

        sys.stdout.write(metrics_reference.markdown())
        return 0
    from async_rl.config import reference

    sys.stdout.write(reference.markdown() if parsed.markdown else reference.json_schema())
    return 0


SCHEMA = Command(
    "schema",
    "print every setting, or every metric",
    "Settings are printed as a JSON schema, for editors, unless told otherwise.",
    _add_options,
    _schema,
)
