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
from tests.gpu.proof import Case, Recorder, exit_code, show, write

ROOT = Path(__file__).parents[2]
SUITE = '''
import pytest

def test_it_holds(record_property):
    """What it proves.

    More words.
    """
    record_property("speed", "3 GiB/s")

def test_it_breaks():
    """A thing that is not so."""
    assert 1 + 1 == 3

def test_it_is_left_out():
    """A case that was not run."""
    pytest.skip("no such kernel")

@pytest.mark.gpus(2)
@pytest.mark.skip(reason="needs 2 CUDA devices")
def test_it_needs_two():
    """A thing between two devices."""
'''


@pytest.mark.real
def test_each_case_has_a_verdict_and_what_it_measured_when_a_suite_was_run(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_unimportable.py").write_text("raise RuntimeError('no such library')\n")
    recorder = Recorder(num_gpus=1)
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "--continue-on-collection-errors"]
    pytest.main(["-q", "-p", "no:cacheprovider", *config, str(folder)], [recorder])
    cases = list(recorder.cases.values())
    assert {case.name: case.verdict for case in cases} == {
        "test_it_holds": "held",
        "test_it_breaks": "failed",
        "test_it_is_left_out": "did not run",
        "test_it_needs_two": "needs more GPUs",
        "test_unimportable.py": "failed",
    }
    by_name = {case.name: case for case in cases}
    held, broken, left_out = (by_name[f"test_it_{what}"] for what in ("holds", "breaks", "is_left_out"))
    assert (held.title, held.figures) == ("What it proves.", {"speed": "3 GiB/s"})
    assert "1 + 1" in broken.why
    assert "no such kernel" in left_out.why
    assert "no such library" in by_name["test_unimportable.py"].why
    text = StringIO()
    show(cases, "a machine", Console(file=text, width=160))
    for words in ("What it proves.", "3 GiB/s", "needs more GPUs", "1 of 4 cases held", "no such kernel"):
        assert words in text.getvalue()
    write(cases, {"GPU": "none"}, tmp_path / "proof.json")
    assert json.loads((tmp_path / "proof.json").read_text())["exit_code"] == 1


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("held", "needs more GPUs"), 0),
        (("held", "failed"), 1),
        (("held", "did not run"), 1),
        (("needs more GPUs",), 1),
        ((), 1),
    ],
)
def test_the_exit_code_is_0_only_when_every_case_that_could_run_held(verdicts, code: int) -> None:
    assert exit_code([Case("a", "A.", verdict=verdict) for verdict in verdicts]) == code


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
