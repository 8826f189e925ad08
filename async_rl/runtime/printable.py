"""Shows control characters in text as escapes, so that no text controls a terminal or forges lines of a log.

Task ids, answers, names of models and errors of engines come from datasets, policies, servers and files.
Everything that a command prints or logs passes here, or through `observability.text_console`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from types import TracebackType
from typing import Any, Final, TextIO

_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, directions of text
    "\ud800-\udfff]"  # halves of surrogate pairs, which no stream can encode
)


MAX_LINE_CHARS: Final = 200
"""The length of a line that stands for a whole error in a table."""


def printable(text: str) -> str:
    r"""Return text with control characters as escapes: ESC as `\u001b`. In JSON this changes no value."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_surrogates(text: str) -> str:
    """Return text with halves of surrogate pairs replaced by question marks.

    The JSON that a policy writes may contain them, and no tokenizer, file or message can.
    """
    return text.encode(errors="replace").decode()


def first_line(text: str) -> str:
    """Return the first line of a text, cut to `MAX_LINE_CHARS`, without control characters."""
    line = next(filter(None, map(str.strip, text.splitlines())), "")
    return printable(line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…")


def as_json(value: Any) -> str:
    """Return a value as JSON for a policy, which reads `NaN` and `Infinity` where JSON has only null.

    Raises:
        TypeError: It is of no type that JSON has.
        ValueError: It is nested too deeply, or contains itself.
    """
    import msgspec  # the command line starts without it

    # Bytes stay bytes, which JSON refuses: as base64 a policy could not read them.
    plain = msgspec.to_builtins(value, str_keys=True, builtin_types=(bytes, bytearray, memoryview))
    return without_surrogates(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))


def print_text(text: str, *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print text without control characters; to stdout by default."""
    print(printable(text), file=file or sys.stdout, end=end, flush=flush)


def print_exception(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None = None
) -> None:
    """Print the traceback of an error that nothing handled; for `sys.excepthook`."""
    print_text("".join(traceback.format_exception(kind, error, frames)), file=sys.stderr, end="")


class PrintableFormatter(logging.Formatter):
    """Formats log records without control characters; further lines of a record are indented.

    Each line that begins at the margin begins a record, so that no message can add one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Implements `logging.Formatter.format`."""
        return printable(super().format(record)).replace("\n", "\n  ")
