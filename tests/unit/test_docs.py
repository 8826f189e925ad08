"""What pages name exists: links, files, headings, tests, settings, metrics and commands."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from async_rl.cli.main import COMMANDS, main
from async_rl.config import describe_fields, load_config
from tests.support.pages import section, without_code

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/reference/config.md", "docs/reference/metrics.md"}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "monitoring/README.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)
FOLDERS = [
    *("async_rl", "agent_loops", "trainer", "tests", "verification"),
    *("monitoring", "examples", "benchmarks", "scripts", "requirements"),
]
KEYS = {key.replace("[]", "") for key, *_ in describe_fields()}


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(text_of(page)), re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in texts}


def links(page: str) -> list[tuple[str, str]]:
    """Return the relative links of a page: the file from the root of the repository, and the anchor."""
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page)))
    parts = (link.partition("#") for link in found if not re.match(r"[a-z]+:", link))
    base = (ROOT / page).parent
    return [
        (str((base / file).resolve().relative_to(ROOT)) if file else page, anchor)
        for file, _, anchor in parts
    ]


def broken_links(page: str) -> Iterator[str]:
    for file, anchor in links(page):
        if not (ROOT / file).exists() or (anchor and anchor not in anchors(file)):
            yield f"{file}#{anchor}"


def missing_files(page: str) -> Iterator[str]:
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+\.\w+)`", text_of(page)):
        if not (ROOT / name).exists():
            yield name


def missing_tests(page: str) -> Iterator[str]:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(page)):
        if not re.search(rf"^(?:async )?def {name}\(", text_of(file), re.MULTILINE):
            yield f"{file}::{name}"


def missing_settings(page: str) -> Iterator[str]:
    sections = "|".join({key.partition(".")[0] for key in KEYS})
    for name in re.findall(rf"(?<![\w/.-])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/])", text_of(page)):
        is_file = re.search(r"\.(jsonl?|ya?ml|md|py)$", name)
        paths = [folder / name.replace(".", "/") for folder in (ROOT / "async_rl", ROOT)]
        is_module = any(path.is_dir() or path.with_suffix(".py").exists() for path in paths)
        is_free = name.startswith(("rollout.agent_loop_args.", "placement.resources_per_", "data.keys."))
        is_section = any(key.startswith(f"{name}.") for key in KEYS)
        if name not in KEYS and not (is_file or is_module or is_free or is_section):
            yield name


def missing_metrics(page: str) -> Iterator[str]:
    known = set(re.findall(r"^\| `(\w+)", text_of("docs/reference/metrics.md"), re.MULTILINE))
    for name in re.findall(r"`async_rl_(\w+?)(?:_bucket|_sum|_count)?(?:\{\w+\})?`", text_of(page)):
        if page not in GENERATED and name not in known and f"async_rl_{name}" not in known:
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    for find in (broken_links, missing_files, missing_tests, missing_settings, missing_metrics):
        assert sorted(set(find(page))) == [], find.__name__


def test_pages_that_code_and_configs_name_exist() -> None:
    named = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".yaml", ".yml", ".md", ".sh", ".json", ".jinja"}
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|png|svg)", path.read_text(encoding="utf-8"))
    }
    assert {(file, name) for file, name in named if not (ROOT / name).is_file()} == set()


def commands_of(page: str) -> list[list[str]]:
    """Return the commands in the blocks of a page, in words, without those that have placeholders."""
    fenced = re.findall(r"^(`{3,})(\w*)\n(.*?)^\1$", text_of(page), re.DOTALL | re.MULTILINE)
    blocks = [block for _, language, block in fenced if language in ("", "bash", "sh")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines:
        start = re.match(r"\s*(?:\.venv/bin/)?(?:async-rl|make|python) ", line)
        if start and not re.search(r"\[--|\[dotted|…", line):
            words = shlex.split(line.replace(".venv/bin/", ""), comments=True)
            found += [part.split("\0") for part in "\0".join(words).split("\0&&\0")]
    return found


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Namespace]:
    """What the commands of `async-rl` are called with, in place of being run."""
    calls: list[Namespace] = []

    def run(options: Namespace) -> int:
        calls.append(options)
        return 0

    recorded = [command._replace(run=run) for command in COMMANDS]
    monkeypatch.setattr("async_rl.cli.main.COMMANDS", recorded)
    monkeypatch.chdir(ROOT)
    return calls


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = {"README.md"}, ["README.md"]
    while left:
        for file, _ in links(left.pop()):
            if file in PAGES and file not in reached:
                reached.add(file)
                left.append(file)
    examples = {page for page in PAGES if page.startswith("examples/")}  # linked as folders
    assert set(PAGES) - reached - examples == set()


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_programs_take_the_commands_of_a_page(page: str, parsed: list[Namespace]) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    for program, *words in commands_of(page):
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets
        elif program == "async-rl":
            words = words[: words.index(">")] if ">" in words else words
            assert main(words) == 0
            config = getattr(parsed[-1], "config", None)
            if config is not None and config.is_file():
                load_config(config, parsed[-1].overrides)
        elif words[0] == "-m":
            assert find_spec(words[1]) is not None
        else:
            assert (ROOT / words[0]).is_file()


def test_every_promise_names_its_test_and_its_lane() -> None:
    rows = re.findall(
        r"^\| .+ \| `make (test|test-real|test-long)` \| `(tests/\S+)` \|$", text_of("CONTRIBUTING.md"), re.M
    )
    assert len(rows) > 40
    for lane, file in rows:
        whole = re.search(r"^pytestmark = .*(?:\n    .*)*mark\.(real|long)\b", text_of(file), re.M)
        if lane == "test":
            assert whole is None, f"{file} is not in make test"
        else:
            mark = rf"mark\.{lane.removeprefix('test-')}\b"
            assert re.search(mark, text_of(file)), f"{file} is not in make {lane}"


def test_every_command_is_in_the_reference() -> None:
    documented = re.findall(r"^\| `async-rl ([\w-]+)", text_of("docs/reference/cli.md"), re.M)
    assert sorted(documented) == sorted(command.name for command in COMMANDS)


def test_each_row_of_the_threat_model_names_its_test() -> None:
    page = text_of("docs/security.md")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| you: ")]
    assert len(rows) > 40
    assert [
        row for row in rows if "`tests/" not in row and not row.startswith(("| who ", "| defence "))
    ] == []


def test_every_known_issue_names_its_test() -> None:
    index = section("design/simulation.md", "## Known-issues regression index")
    rows = re.findall(r"^\| (\d+) \|(.*)$", index, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    assert [number for number, row in rows if "`tests/" not in row] == []
