"""`make gpu-proof` where there is no GPU, and what becomes of its cases where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.gpu.__main__ import main
from tests.gpu.proof import NEEDS, Case, exit_code, read, show, write
from tests.gpu.slices import Slice

ROOT = Path(__file__).parents[2]
SUITE = '''
import os, signal, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.proof(needs="trainer", seconds=60)

@pytest.fixture(autouse=True)
def noted(request):
    with Path(__file__).with_name("ran").open("a") as file:
        file.write(request.node.name + "\\n")

@pytest.mark.proof(value=1)
def test_it_comes_last():
    """A thing of little value."""

@pytest.mark.proof(value=9)
def test_it_holds(record_property):
    """What it proves.

    More words.
    """
    record_property("speed", "3 GiB/s")

@pytest.mark.proof(value=8)
def test_it_breaks():
    """A thing that is not so."""
    assert 1 + 1 == 3

@pytest.mark.proof(value=7)
def test_it_ends_its_process():
    """A crash of a library."""
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.proof(value=6, seconds=0.5)
def test_it_hangs():
    """A kernel that does not end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGINT])
    time.sleep(1000)

@pytest.mark.proof(value=5)
def test_it_is_left_out():
    """A case that was not run."""
    pytest.skip("no such kernel")

@pytest.mark.proof(value=4, seconds=10_000)
def test_it_is_long():
    """A case that takes hours."""

@pytest.mark.proof(value=3, needs="trainer engine")
def test_it_needs_an_engine():
    """A case with an engine."""

@pytest.mark.skip(reason="needs more GPUs: 2, torch sees 1")
@pytest.mark.proof(value=2, needs="trainer two-gpus")
def test_it_needs_two():
    """A thing between two devices."""
'''
VERDICTS = {
    "test_it_holds": "held",
    "test_it_breaks": "failed",
    "test_it_ends_its_process": "failed",
    "test_it_hangs": "failed",
    "test_it_is_left_out": "did not run",
    "test_it_is_long": "no time left",
    "test_it_needs_an_engine": "did not run",
    "test_it_needs_two": "needs more GPUs",
    "test_it_comes_last": "held",
    "test_unimportable.py": "failed",
}
RAN = [name for name, verdict in VERDICTS.items() if name.startswith("test_it_")]
MACHINE, CODE = {"GPU": "H100"}, {"commit": "abc", "digest": "123"}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with stand-ins for cases."""
    (folder := tmp_path / "suite").mkdir()
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_unimportable.py").write_text("raise RuntimeError('no such library')\n")
    return folder


def slice_of(folder: Path, **settings) -> Slice:
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    needs = ["trainer", "two-gpus"]
    return Slice([*config, str(folder)], folder / "log", **({"needs": needs, "grace_s": 0.5} | settings))


def names_that_ran(folder: Path) -> list[str]:
    ran = (folder / "ran").read_text().split()
    (folder / "ran").write_text("")
    return ran


@pytest.mark.real
def test_each_case_has_a_verdict_when_others_fail_crash_hang_or_take_too_long(suite: Path) -> None:
    path, written = suite / "proof.json", []

    def note(case: Case) -> None:
        write(part.cases.values(), MACHINE, CODE, path)
        cases = json.loads(path.read_text())["cases"]
        written.append((case.name, sum(each["verdict"] != "did not run" for each in cases)))

    part = slice_of(suite, minutes=60, ended=note)
    part.run()
    cases = {case.name: case for case in part.cases.values()}
    assert {name: case.verdict for name, case in cases.items()} == VERDICTS
    assert [case.name for case in cases.values() if case.line().count(case.verdict) != 1] == []
    assert names_that_ran(suite) == [
        *RAN[:5],  # the fixture sees the case that is left out, too
        "test_it_comes_last",
    ]
    assert [name for name, _ in written] == [
        "test_unimportable.py",
        *[name for name in RAN if name != "test_it_needs_an_engine"],
    ]
    assert [count for _, count in written] == sorted(count for _, count in written)
    held = cases["test_it_holds"]
    assert (held.title, held.figures) == ("What it proves.", {"speed": "3 GiB/s"})
    for name, words in {
        "test_it_breaks": "1 + 1",
        "test_it_ends_its_process": "ended with code -9",
        "test_it_hangs": "did not end within 0.5 s",
        "test_it_is_left_out": "no such kernel",
        "test_it_needs_an_engine": "NEEDS leaves out engine",
        "test_unimportable.py": "no such library",
    }.items():
        assert words in cases[name].why
        assert words in cases[name].line() or name == "test_it_needs_an_engine"
    text = StringIO()
    show(list(cases.values()), "a machine", Console(file=text, width=160))
    for words in ("What it proves.", "3 GiB/s", "needs more GPUs", "2 held", "no such kernel"):
        assert words in text.getvalue()


@pytest.mark.real
def test_what_has_held_is_not_run_again_at_the_same_code_on_the_same_machine(suite: Path) -> None:
    (suite / "test_unimportable.py").unlink()
    path = suite / "proof.json"
    first = slice_of(suite)
    first.suite = [*first.suite, "-k", "holds or breaks or last"]
    first.run()
    write(first.cases.values(), MACHINE, CODE, path)
    assert names_that_ran(suite) == ["test_it_holds", "test_it_breaks", "test_it_comes_last"]
    again = slice_of(suite, cases=read(MACHINE, CODE, path))
    again.suite = first.suite
    again.run()
    assert names_that_ran(suite) == ["test_it_breaks"]
    assert {case.name: case.figures for case in again.cases.values()} == {
        "test_it_holds": {"speed": "3 GiB/s"},
        "test_it_breaks": {},
        "test_it_comes_last": {},
    }
    assert read(MACHINE | {"GPU": "A100"}, CODE, path) == {}
    assert read(MACHINE, CODE | {"digest": "456"}, path) == {}
    assert read(MACHINE, CODE, suite / "none.json") == {}


@pytest.mark.real
def test_a_rehearsal_runs_cases_without_a_gpu_and_says_so(suite: Path) -> None:
    (suite / "test_unimportable.py").unlink()
    (suite / "test_timed.py").write_text(
        "import pytest\n"
        "@pytest.mark.proof(needs='trainer', seconds=60, value=1)\n"
        "def test_it_is_timed():\n"
        "    pytest.skip('not rehearsed: it measures a GPU')\n"
    )
    part = slice_of(suite, rehearse=True)
    part.suite = [*part.suite, "-k", "holds or needs_two or is_timed"]
    part.run()
    cases = {case.name: case for case in part.cases.values()}
    assert {name: case.verdict for name, case in cases.items()} == {
        "test_it_holds": "rehearsed",
        "test_it_needs_two": "needs more GPUs",
        "test_it_is_timed": "not rehearsed",
    }
    assert cases["test_it_is_timed"].line().count("not rehearsed") == 1


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("held", "needs more GPUs"), 0),
        (("held", "rehearsed", "not rehearsed"), 0),
        (("held", "failed"), 1),
        (("held", "did not run"), 1),
        (("held", "no time left"), 1),
        (("needs more GPUs",), 1),
        ((), 1),
    ],
)
def test_the_exit_code_is_0_only_when_every_case_that_could_run_held(verdicts, code: int) -> None:
    cases = [Case("a", "A.", ["trainer"], 1, 1, verdict=verdict) for verdict in verdicts]
    assert exit_code(cases) == code
    assert exit_code([*cases, Case("b", "B.", ["engine"], 1, 1)], ["trainer"]) == code
    assert exit_code([*cases, Case("b", "B.", ["engine"], 1, 1)], NEEDS) == 1


@pytest.mark.real
@pytest.mark.megatron
def test_the_page_has_all_cases_in_the_order_of_their_value(tmp_path: Path) -> None:
    part = Slice(["--collect-only", str(ROOT / "tests" / "gpu")], tmp_path / "log")
    part.run()
    rows: dict[str, str] = {}
    for case in part.cases.values():
        name = case.name.partition("[")[0]
        rows.setdefault(name, f"| `{name}` | {', '.join(case.needs)} | {case.longest_s:.0f} s |")
    page = (ROOT / "docs" / "guide" / "gpu-recipes.md").read_text(encoding="utf-8").splitlines()
    found = [line for line in page if line.startswith("| `test_")]
    assert [line[: len(row)] for line, row in zip(found, rows.values(), strict=True)] == list(rows.values())


@pytest.mark.real
@pytest.mark.megatron
def test_megatron_is_imported_without_warnings_when_transformer_engine_is_there() -> None:
    code = (
        "from importlib import util; real = util.find_spec\n"
        "import torch; torch.cuda.is_available = lambda: True\n"
        "util.find_spec = lambda name, *a: object() if name == 'transformer_engine' else real(name, *a)\n"
        "import sys, types\n"
        "sys.modules['transformer_engine.pytorch'] = types.ModuleType('transformer_engine.pytorch')\n"
        "compiled = torch.compile\n"
        "from trainer.megatron import cpu\n"
        "assert cpu.has_transformer_engine() and torch.compile is compiled\n"
        "torch.cuda.is_available = lambda: False\n"
        "import trainer.worker\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::ImportWarning", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_says_that_there_is_no_gpu_and_ends_with_the_documented_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-proof"])
    assert main() == 3
    said = capsys.readouterr().err
    assert "sees no GPU" in said
    assert "requirements/gpu.txt" in said
