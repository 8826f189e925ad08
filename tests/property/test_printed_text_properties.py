"""Task ids, answers, names of models and errors of engines are shown, and control no terminal."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from async_rl.cli.inspection.show import show_table, show_trajectory
from async_rl.cli.inspection.trajectory_view import view_trajectory
from async_rl.observability.console_report import RunProgress
from async_rl.observability.evaluation_record import Estimate, EvaluationRecord, EvaluationScore
from async_rl.observability.evaluation_report import show_scores
from async_rl.observability.text_console import TextConsole
from async_rl.runtime.printable import printable
from async_rl.store.archive import ArchiveRow, without_routing
from tests.support.trajectories import make_trajectory

_PIECES = (
    "\x1b[2J",
    "\x1b]52;c;eA==\x07",
    "\x9b1m",
    "[/x]",
    "[bold]",
    "[link=x]",
    ":smile:",
    "\u202e",
    "\u2028",
    "\r",
)
HOSTILE = st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=4)), max_size=8).map("".join)
_ALLOWED_CONTROL = {"\n", "\t"}


def is_clean(text: str) -> bool:
    """Whether a text controls no terminal."""
    directions = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    found = {c for c in text if c in directions or unicodedata.category(c) in kinds}
    return found <= _ALLOWED_CONTROL


def console(*, terminal: bool) -> tuple[TextConsole, io.StringIO]:
    out = io.StringIO()
    return TextConsole(file=out, width=200, force_terminal=terminal, color_system=None), out


@pytest.mark.real
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE, terminal=st.booleans())
def test_no_view_prints_a_control_character(text: str, terminal: bool) -> None:
    shown, out = console(terminal=terminal)
    made = make_trajectory("a", sampled=[(3, 1), (2, 2)])
    segments = [replace(s, engine_id=text) if hasattr(s, "engine_id") else s for s in made.segments]
    outcome = replace(made.outcome, stop_reason=text, error=text, reward_parts={text: 1.0})
    hostile = replace(
        made, trajectory_id=text, task_id=text, group_id=text, segments=tuple(segments), outcome=outcome
    )
    show_trajectory(shown, view_trajectory(without_routing(hostile), lambda ids: text))
    score = EvaluationScore(tasks=1, answers=1, reward=Estimate(value=1.0))
    record = EvaluationRecord(weight_version=1, status="done", scores={text: score}, dropped={text: 1})
    show_scores(shown, text, record)
    progress = RunProgress(shown)
    progress.phase(text)
    progress.flow(in_flight=1, queued=1, waiting_for=text)
    shown.print(progress.render())
    row = ArchiveRow(
        number=1,
        trajectory_id=text,
        group_id=text,
        task_id=text,
        attempt=1,
        status="failed",
        reason=text,
        failure=text,
        step=None,
        reward=None,
        stop_reason=text,
        turns=1,
        tokens=1,
        sampled=1,
        interruptions=0,
        oldest_version=None,
        newest_version=None,
        duration_s=1.0,
    )
    show_table(shown, [row], [text], text)
    assert is_clean(re.sub(r"\x1b\[\?25[lh]", "", out.getvalue()))


@given(text=st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"])))
def test_text_without_control_characters_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
