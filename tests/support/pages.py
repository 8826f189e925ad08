"""Reads examples and tables from the pages of `docs/`, so that tests can run and check them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, heading: str) -> str:
    """Return the part of a page under a heading such as `## Rewards`, with its subsections."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(
        rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", without_code(text), re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/{page} has no section {heading!r}"
    return text[found.start(1) : found.end(1)]


def blocks(page: str, language: str, heading: str | None = None) -> list[str]:
    """Return the fenced blocks of one language on a page or in one section; `""` means no language."""
    text = (DOCS / page).read_text(encoding="utf-8") if heading is None else section(page, heading)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for kind, block in fenced if kind == language]


def without_code(text: str) -> str:
    """Return the text with fenced blocks blanked out; every character keeps its position."""
    return re.sub(
        r"^(`{3,})[^\n]*\n.*?^\1$",
        lambda found: re.sub(r"[^\n]", " ", found[0]),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
