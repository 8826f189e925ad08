"""The entry point of `async-rl COMMAND`; `async_rl.cli.commands` holds the commands.

Nothing heavy is imported before the arguments are parsed, so that `--help` answers at once. Every error ends
here, as one sentence on stderr and an exit code: 0 done, 1 a service failed, 2 the config cannot work, 3 the
environment is not ready, 4 the run stalled, 130 and 143 stopped by Ctrl-C or SIGTERM. The run's log has the
traceback.
"""

from __future__ import annotations

import argparse
import errno
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from async_rl import __version__
from async_rl.cli.commands import COMMANDS
from async_rl.errors import AsyncRLError
from async_rl.runtime.descriptors import raise_descriptor_limit
from async_rl.runtime.printable import print_exception, print_text

_UNWRITABLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EPIPE})
"""A full disk, or a reader that has gone, as of `async-rl schema | head`: no traceback says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the command line.

    Args:
        arguments: The command line without the program; None takes those of the process.

    Returns:
        The exit code.
    """
    parsed = _parse(arguments)
    sys.excepthook = print_exception
    raise_descriptor_limit()
    try:
        with _cleaning_up_on_sigterm():
            code: int = parsed.run_command(parsed)
        sys.stdout.flush()  # the interpreter would report an error without a sentence
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of `os.getcwd`
            print_text("async-rl: the working directory is gone: change to one that exists", file=sys.stderr)
            return 2
        if error.errno not in _UNWRITABLE:
            raise
        what = error.filename or "the output"
        print_text(f"async-rl: cannot write {what}: {error.strerror}", file=sys.stderr)
        sys.stdout = io.StringIO()  # the interpreter writes what is left, and would report the error again
        return 1
    except AsyncRLError as error:
        print_text(f"async-rl: {error}", file=sys.stderr)
        return error.exit_code
    except _Terminated:
        return 143
    except KeyboardInterrupt:
        return 130
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. `SystemExit` would be taken for a user's `sys.exit`, in whose code it arrives."""


@contextmanager
def _cleaning_up_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the command, as Ctrl-C does, so that it ends its servers and removes its files."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words)
    parsed, left = parser.parse_known_args(words)
    # argparse accepts overrides in one place only, but users put options between them.
    if any(word.startswith("-") for word in left) or (left and "overrides" not in parsed):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        parsed.overrides = [*parsed.overrides, *left]
    return parsed


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; of the commands, only those among the words have their options."""
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Fully-async reinforcement learning of MoE language models with partial rollouts.",
        epilog="Exit codes: 0 done, 1 a service failed, 2 the config cannot work, 3 the environment is not "
        "ready, 4 the run stalled, 130 or 143 stopped by a signal.",
    )
    parser.add_argument("--version", action="version", version=f"async-rl {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=f"{summary} {command.details}"
        )
        if command.name in words:
            command.add_options(subparser)
        subparser.set_defaults(run_command=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
