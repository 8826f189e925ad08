"""The command line: `async-rl train | check | schema`.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once. What goes wrong
ends here, as one sentence on stderr and an exit code: 0 done, 1 a service failed, 2 the config cannot work, 3
the environment is not ready, 130 and 143 stopped by Ctrl-C or SIGTERM. The traceback is in the run's log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
        "ready, 130 or 143 stopped by a signal.",
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
    ):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}. {more}")
        command.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see docs/config.md")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="dotted.key=value",
            help="changes to the config; values are YAML, for example rollout.max_staleness=2",
        )
    schema = commands.add_parser("schema", help="print every setting as JSON schema")
    schema.add_argument("--markdown", action="store_true", help="as the tables of docs/config.md instead")
    return parser


def _schema(markdown: bool) -> int:
    from async_rl import reference

    sys.stdout.write(reference.markdown() if markdown else reference.json_schema())
    return 0


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
