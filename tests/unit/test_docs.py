"""The documentation links to, names and lists only what exists, and every page is reached from the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rl.cli.main import COMMANDS
from async_rl.config import describe_fields
from tests.support.pages import section, without_code

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


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_a_page_has_no_conflict_markers(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^(?:<{7}|>{7}) .*$", text, re.MULTILINE) == []


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


def test_every_promise_names_its_test_and_its_lane() -> None:
    rows = re.findall(
        r"^\| .+ \| `make (test|test-long)` \| `(tests/\S+)` \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    assert len(rows) > 40
    for lane, file in rows:
        text = (ROOT / file).read_text(encoding="utf-8")
        is_long = re.search(r"^pytestmark = .*(?:\n    .*)*mark\.long", text, re.M)
        assert "mark.long" in text if lane == "test-long" else not is_long, f"{file} is not in make {lane}"


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `async-rl ([\w-]+)", page, re.M)
    assert sorted(documented) == sorted(command.name for command in COMMANDS)


def test_the_glossary_has_at_most_40_terms() -> None:
    rows = re.findall(r"^\| (?!term|-)", section("design/architecture.md", "## Glossary"), re.M)
    assert 20 <= len(rows) <= 40


def test_the_paths_through_the_code_are_shorter_than_before() -> None:
    for heading, most in (
        ("From a task to a trained batch", 19),
        ("From SGLang's reply to Megatron's router", 18),
    ):
        files = re.findall(r"^\d+\. `([\w/]+\.py)`", section("design/architecture.md", f"## {heading}"), re.M)
        assert 10 <= len(files) <= most
        assert [file for file in files if not (ROOT / file).is_file()] == []


SECTIONS = {key.partition(".")[0] for key, *_ in describe_fields()}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    folders = "async_rl|agent_loops|trainer|tests|monitoring|examples|benchmarks|scripts|requirements"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(
            rf"^(?:async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert missing == []


def test_each_row_of_the_threat_model_names_its_test() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| you: ")]
    assert len(rows) > 40
    headings = ("| who ", "| defence ")
    without = [row for row in rows if "`tests/" not in row and not row.startswith(headings)]
    assert without == []


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    keys = {key.replace("[]", "") for key, *_ in describe_fields()}
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/])", text))
    free = ("rollout.agent_loop_args.", "placement.resources_per_")
    unknown = {
        name
        for name in named
        if name not in keys
        and not any(key.startswith(f"{name}.") for key in keys)
        and not name.startswith(free)
        and not re.search(r"\.(jsonl?|ya?ml|md|py)$", name)
        and not _is_module(name)
    }
    assert unknown == set()


def _is_module(name: str) -> bool:
    """Whether a dotted name is a package or module of `async_rl` or `trainer`."""
    paths = (ROOT / "async_rl" / name.replace(".", "/"), ROOT / name.replace(".", "/"))
    return any(path.is_dir() or path.with_suffix(".py").exists() for path in paths)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_metrics_that_a_page_names_exist(page: str) -> None:
    known = set(re.findall(r"^\| `(\w+)", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"`async_rl_(\w+?)(?:_bucket|_sum|_count)?(?:\{\w+\})?`", (ROOT / page).read_text())
    )
    assert {name for name in named if name not in known and f"async_rl_{name}" not in known} == set()
