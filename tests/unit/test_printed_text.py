"""What is printed and logged holds no control characters, whatever datasets, policies and engines say."""

from __future__ import annotations

import ast
import logging
import sys
import unicodedata
from pathlib import Path

import pytest

from async_rl.errors import EngineError
from async_rl.run.folder import logging_to
from async_rl.runtime.printable import print_exception, print_text, printable

ROOT = Path(__file__).parents[2]
HOSTILE = "[/x]\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b31m\x7f\r\x08\u202egnp.exe\u2066\u2028[bold]:warning:\x00"
"""Closes a tag, writes the clipboard, clears the screen, and turns the direction of text."""
PLAIN_TEXT = {"\n", "\t"}
DIRECTIONS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def control_characters(text: str) -> set[str]:
    """The characters of a text that control a terminal."""
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    return {c for c in text if c in DIRECTIONS or unicodedata.category(c) in kinds} - PLAIN_TEXT


def test_every_control_character_is_shown_as_an_escape() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = printable(every)
    assert control_characters(shown) == set()
    assert printable("a\x1b\x9b\u202e\n\té😀\\[/x]") == "a\\u001b\\u009b\\u202e\n\té😀\\[/x]"
    assert printable(shown) == shown


def test_a_log_has_no_control_characters_and_no_forged_records(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    with logging_to(path):
        log = logging.getLogger("async_rl.test")
        log.info("task %s\n2026-01-01 00:00:00,000 INFO async_rl.run: forged", HOSTILE)
        try:
            raise EngineError(f"{HOSTILE}\n2026-01-01 00:00:00,000 INFO async_rl.run: forged")
        except EngineError as error:
            log.error("failed", exc_info=error)
    text = path.read_text()
    assert control_characters(text) == set()
    begin = [line for line in text.split("\n") if line and not line.startswith("  ")]
    assert len(begin) == 2
    assert all("async_rl.test" in line for line in begin)


def test_a_traceback_of_an_unhandled_error_has_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ValueError(HOSTILE)
    print_exception(ValueError, error)
    print_text(HOSTILE, file=sys.stderr)
    shown = capsys.readouterr().err
    assert control_characters(shown) == set()
    assert "ValueError" in shown


_OWN_PROGRAMS = (
    "verification/simulation/",
    "agent_loops/sandbox_child.py",
    "agent_loops/harness/fork_server.py",
    "async_rl/runtime/reaper.py",
)
"""Programs of their own, which print figures, in a sandbox, or representations."""
_ALLOWED = {
    "print": "async_rl/runtime/printable.py",
    "Formatter": "async_rl/runtime/printable.py",
    "Console": "async_rl/observability/text_console.py",
    "from_markup": "",
}
"""Names that print or format text, with the only module that may call each."""


def test_only_the_sanitiser_prints_text_and_formats_logs() -> None:
    found = []
    for path in sorted(
        path for part in ("async_rl", "agent_loops", "trainer") for path in (ROOT / part).rglob("*.py")
    ):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(_OWN_PROGRAMS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            receiver = ast.unparse(node.func)
            prints = called in _ALLOWED and receiver in (called, f"logging.{called}", f"Text.{called}")
            if (prints and _ALLOWED[called] != name) or receiver in ("sys.stdout.write", "sys.stderr.write"):
                found.append(f"{name}:{node.lineno}: {receiver}")
            markup = {k.arg: k.value for k in node.keywords}.get("markup")
            if called == "TextColumn" and not (isinstance(markup, ast.Constant) and markup.value is False):
                found.append(f"{name}:{node.lineno}: TextColumn parses markup")
    assert found == []
