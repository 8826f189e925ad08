"""Links of the documentation lead somewhere, and a reader of the README can reach every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import without_code

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/reference/config.md", "docs/reference/metrics.md"}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "monitoring" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)


def prose(page: str) -> str:
    return without_code((ROOT / page).read_text(encoding="utf-8"))


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in texts}


def links(page: str) -> list[tuple[str, str]]:
    """Returns the relative links of a page: the file from the root of the repository, and the anchor."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    parts = (link.partition("#") for link in found if not re.match(r"[a-z]+:", link))
    base = (ROOT / page).parent
    return [
        (str((base / file).resolve().relative_to(ROOT)) if file else page, anchor)
        for file, _, anchor in parts
    ]


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_to_a_file_and_to_a_heading_in_it(page: str) -> None:
    broken = [
        f"{file}#{anchor}"
        for file, anchor in links(page)
        if not (ROOT / file).exists() or (anchor and anchor not in anchors(file))
    ]
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = {"README.md"}, ["README.md"]
    while left:
        for file, _ in links(left.pop()):
            if file in PAGES and file not in reached:
                reached.add(file)
                left.append(file)
    examples = {page for page in PAGES if page.startswith("examples/")}  # linked as folders
    assert set(PAGES) - reached - examples == set()


def test_every_picture_is_shown_on_a_page() -> None:
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "images").iterdir()}
    assert pictures == {file for page in PAGES for file, _ in links(page) if file in pictures}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_lines_have_at_most_120_characters(page: str) -> None:
    long = [
        line
        for line in prose(page).splitlines()
        if len(line.rstrip()) > 120 and not line.lstrip().startswith("|")
    ]
    assert long == []


def test_files_that_code_and_configs_name_in_the_docs_exist() -> None:
    folders = (
        "async_rl",
        "agent_loops",
        "trainer",
        "monitoring",
        "examples",
        "benchmarks",
        "tests",
        "scripts",
    )
    named = {
        (str(path.relative_to(ROOT)), name)
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".yml", ".md", ".sh", ".json", ".jinja"}
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|png|svg)", path.read_text(encoding="utf-8"))
    }
    assert {(file, name) for file, name in named if not (ROOT / name).is_file()} == set()
