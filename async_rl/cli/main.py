"""The command line: `async-rl COMMAND`; the commands are in `async_rl/cli/commands/`.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once. What goes wrong
ends here, as one sentence on stderr and an exit code: 0 done, 1 a service failed, 2 the config cannot work, 3
the environment is not ready, 4 the run stood still, 130 and 143 stopped by Ctrl-C or SIGTERM. The traceback
is in the run's log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from async_rl import __version__
from async_rl.cli.commands.command import Command
from async_rl.cli.commands.doctor import DOCTOR
from async_rl.cli.commands.evaluate import EVALUATE
from async_rl.cli.commands.export import EXPORT
from async_rl.cli.commands.inspect import INSPECT
from async_rl.cli.commands.new_loop import NEW_LOOP
from async_rl.cli.commands.plan import PLAN
from async_rl.cli.commands.report import REPORT
from async_rl.cli.commands.rollout import ROLLOUT
from async_rl.cli.commands.run import CHECK, TRAIN
from async_rl.cli.commands.schema import SCHEMA
from async_rl.cli.commands.sft import SFT
from async_rl.errors import AsyncRLError

COMMANDS: tuple[Command, ...] = (
    NEW_LOOP,
    SFT,
    TRAIN,
    CHECK,
    PLAN,
    ROLLOUT,
    EVALUATE,
    INSPECT,
    REPORT,
    EXPORT,
    DOCTOR,
    SCHEMA,
)
"""In the order of `async-rl --help`: a day's work, from first to last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program; None takes the process's own.

    Returns:
        The exit code.
    """
    parsed = _parse(arguments)
    try:
        code: int = parsed.run_command(parsed)
    except AsyncRLError as error:
        print(f"async-rl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    parsed, left = parser.parse_known_args(arguments)
    # argparse takes overrides in one place only; people put options between them.
    if any(word.startswith("-") for word in left) or (left and "overrides" not in parsed):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        parsed.overrides = [*parsed.overrides, *left]
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Fully-async reinforcement learning of MoE language models with partial rollouts.",
        epilog="Exit codes: 0 done, 1 a service failed, 2 the config cannot work, 3 the environment is not "
        "ready, 4 the run stood still, 130 or 143 stopped by a signal.",
    )
    parser.add_argument("--version", action="version", version=f"async-rl {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=f"{summary} {command.details}"
        )
        command.add_options(subparser)
        subparser.set_defaults(run_command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
