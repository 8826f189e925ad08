"""`make setup-gpu`, `check --here` and refusals without TransformerEngine; stand-ins for a GPU's programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.cli.main import main
from async_rl.placement.actors import prepare_rank_environment
from async_rl.run import this_machine
from async_rl.runtime import devices
from tests.gpu import first_kernel
from tests.support.bare_machine import BareMachine
from tests.support.run_config import write_run
from trainer import validate

ROOT = Path(__file__).parents[2]
FAKE_PYTHON = """
# Stands in for Python and pip: makes environments of itself and writes down what is installed into them.
case "$*" in
  "-c " | "-") exit 0 ;;
  "--version") echo "Python 3.12.9" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-c import sysconfig"*) echo /site-packages ;;
  "-c import sys; print"*) echo py312 ;;
  "-m pip install"*)
    echo "pip ${*:4} CPATH=$CPATH FORCE=$NVTE_PYTORCH_FORCE_BUILD" >> "$CALLS"
    [[ -z $FAILS || "$*" != *$FAILS* ]] || { echo "ERROR: no such version"; exit 1; } ;;
  *) echo "run $*" >> "$CALLS" ;;
esac
"""


class Machine(BareMachine):
    """A machine with a GPU on which everything is a stand-in."""

    def __init__(self, folder: Path) -> None:
        lists = [f"requirements/gpu{which}.txt" for which in ("", "-py311", "-py312", "-source")]
        super().__init__(folder, "scripts/setup-gpu.sh", "pyproject.toml", *lists, path="/usr/bin:/bin")
        self.add("nvidia-smi", "echo '580.159.03, NVIDIA H100 80GB HBM3'")
        self.add("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.48'")
        self.add("g++", "echo 11")
        self.add("df", "printf 'Filesystem\\n/dev/sda1 1 2 20000000 80%% /\\n'")
        self.add("python3.11", FAKE_PYTHON)

    def set_up(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/setup-gpu.sh", CALLS=str(self.folder / "calls"), **environment)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_only_pinned_files_are_installed_and_what_was_not_finished_is_made_again(machine: Machine) -> None:
    done = machine.set_up(FAILS="gpu-source")
    assert done.returncode == 3
    assert "TransformerEngine, compiled here: some minutes (2 of 4) failed; all of the output" in done.stderr
    assert machine.set_up().returncode == 0
    *_, pinned, fused, project, kernel = machine.calls
    pip = "pip --disable-pip-version-check --no-input --no-deps"
    assert pinned.startswith(f"{pip} --require-hashes -r requirements/gpu-py312.txt")
    fresh = "--no-cache-dir --no-build-isolation"  # none that was built against another torch
    assert fused.startswith(f"{pip} {fresh} --require-hashes -r requirements/gpu-source.txt")
    headers = "/site-packages/nvidia"
    assert f"CPATH={headers}/cudnn/include:{headers}/nccl/include:{headers}/cu13/include" in fused
    assert fused.endswith("FORCE=TRUE")
    assert project.startswith(f"{pip} --no-build-isolation --editable .")
    assert kernel == "run -m tests.gpu.first_kernel"
    machine.add("df", "exit 1")  # nothing is checked any more
    again = machine.set_up()
    assert (again.returncode, again.stdout, len(machine.calls)) == (0, "", 6)


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        ("nvidia-smi", "exit 9", "nvidia-smi names no driver"),
        ("nvidia-smi", "echo 550.54.15", "the driver is 550.54.15; CUDA 13 needs 580 or newer"),
        ("nvcc", "echo 'release 12.8, V12.8.1'", "nvcc is of CUDA 12; torch in requirements/gpu.txt"),
        ("g++", "exit 127", "g++ is missing, and 11 or newer"),
        ("g++", "echo 10.2.1", "g++ is 10, and 11 or newer"),
        (
            "df",
            "printf 'Filesystem\n/dev/sda1 1 2 9000000 80%% /\n'",
            "has 9 GB free, and .venv-gpu takes 15",
        ),
        ("python3.11", "exit 1", "no Python 3.11 or 3.12 with venv and headers (python3.11 has none): "),
    ],
)
def test_what_the_machine_lacks_is_named_before_anything_is_installed(
    machine: Machine, name: str, program: str, message: str
) -> None:
    machine.add(name, program)
    done = machine.set_up(PYTHON="python3.11")
    assert done.returncode == 3
    assert message in done.stderr
    assert machine.calls == []
    assert not (machine.folder / ".venv-gpu").exists()


def test_all_that_is_missing_is_named_at_once(machine: Machine) -> None:
    for name in ("nvidia-smi", "nvcc", "g++", "python3.11"):
        machine.add(name, "exit 1")
    machine.add("df", "printf 'Filesystem\n/dev/sda1 1 2 9000000 80%% /\n'")
    done = machine.set_up(PYTHON="python3.11")
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 5)


@pytest.mark.parametrize(
    ("release", "remedy"),
    [
        ("ID=ubuntu\nVERSION_ID='24.04'", "apt install python3.12-venv python3.12-dev\n"),
        (
            "ID=ubuntu\nVERSION_ID='22.04'",
            "add-apt-repository ppa:deadsnakes/ppa && apt install python3.12-venv",
        ),
        ("ID=debian\nVERSION_ID='12'", "apt install python3.11-venv python3.11-dev\n"),
        (
            "ID=other",
            "uv python install 3.12, then PYTHON=$(python3 -m uv python find 3.12) make setup-gpu\n",
        ),
    ],
)
@pytest.mark.parametrize(
    ("flaw", "named"),
    [
        ("version('3.13.1')", "python3 is 3.13.1, and SGLang's packages have wheels for 3.11 and 3.12"),
        ("version('3.11.0', 'candidate')", "python3 is 3.11.0candidate, which is no release"),
        ("sys.modules['ensurepip'] = None", "python3 cannot make virtual environments"),
        ("sysconfig.get_path = lambda _: '/none'", "python3 has no Python.h"),
    ],
)
def test_a_python_that_does_not_do_is_named_with_what_this_release_has(
    machine: Machine, flaw: str, named: str, release: str, remedy: str
) -> None:
    (machine.folder / "release").write_text(release)
    (machine.folder / "sitecustomize.py").write_text(
        "import collections, sys, sysconfig\n"
        "def version(numbers, level='final'):\n"
        "    kind = collections.namedtuple('version', 'major minor micro releaselevel serial')\n"
        "    sys.version_info = kind(*map(int, numbers.split('.')), level, 0)\n"
        f"{flaw}\n"
    )
    machine.add("python3", f'PYTHONPATH={machine.folder} exec {sys.base_prefix}/bin/python3 "$@"')
    done = machine.set_up(PYTHON="python3", OS_RELEASE=str(machine.folder / "release"))
    assert done.returncode == 3
    assert named in done.stderr
    assert remedy in done.stderr


@pytest.mark.long
@pytest.mark.timeout(660)
@pytest.mark.parametrize("what", ["requirements/gpu.txt", ".[sglang,megatron]"])
def test_pip_finds_versions_that_fit_together(what: str) -> None:
    arguments = ["-r", str(ROOT / what), str(ROOT)] if what.endswith(".txt") else [f"{ROOT}{what[1:]}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, "--report", "-", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"sglang"' in done.stdout


# -- the last step of the set-up


def test_a_package_that_cannot_be_imported_and_a_kernel_that_does_not_compute_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    import_packages = first_kernel.import_packages
    monkeypatch.setattr(first_kernel, "import_packages", lambda: import_packages(("json", "no_such_package")))
    assert first_kernel.main() == 1
    assert "Error: no_such_package cannot be imported: ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.setattr(first_kernel, "import_packages", list)
    monkeypatch.setattr(first_kernel, "KERNELS", {"torch": broken})
    assert first_kernel.main() == 1
    assert "torch does not compute: RuntimeError: no kernel image" in capsys.readouterr().err


# -- async-rl check --here


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        ("nvidia-smi", "echo '550.54.15, NVIDIA A100'", "driver is 550.54.15, NVIDIA A100; CUDA 13"),
        ("nvidia-smi", "exit 9", "driver is not found by nvidia-smi"),
        ("nvcc", "echo 'release 12.8, V12.8.1'", "CUDA toolkit is release 12.8"),
    ],
)
def test_check_shows_what_this_machine_has_and_names_what_it_lacks(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    program: str,
    message: str,
) -> None:
    words = ["check", str(write_run(tmp_path)), "--here"]
    assert main(words) == 0
    assert "here: no GPU, or a torch without CUDA" in capsys.readouterr().out
    monkeypatch.setenv("PATH", machine.path)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(this_machine, "detect_device", lambda: "cuda")
    monkeypatch.setattr(this_machine, "finds_transformer_engine", lambda: True)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "here: driver and GPUs: 580.159.03, NVIDIA H100 80GB HBM3" in out
    assert "here: CUDA toolkit 13.0" in out
    machine.add(name, program)
    assert main(words) == 3
    assert message in capsys.readouterr().err


@pytest.fixture
def transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module that is imported of a TransformerEngine that this machine has."""
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)  # hidden, if Megatron was imported
    folder = tmp_path / "packages" / "transformer_engine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    devices.finds_transformer_engine.cache_clear()
    yield folder / "pytorch.py"
    devices.finds_transformer_engine.cache_clear()


# -- the trainer


@pytest.mark.parametrize(
    ("overrides", "device", "code"),
    [
        ((), "cuda", 3),
        ((), "cpu", 0),
        (("trainer.device=cpu",), "cuda", 0),
        (("model.dtype=float32",), "cuda", 0),
        (("trainer.require_transformer_engine=false",), "cuda", 0),
    ],
)
def test_an_moe_in_bfloat16_is_refused_on_a_gpu_without_transformer_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    device: str,
    code: int,
) -> None:
    monkeypatch.setattr(validate, "detect_device", lambda: device)
    path = write_run(tmp_path)
    assert main(["check", str(path), "model.dtype=bfloat16", *overrides]) == code
    captured = capsys.readouterr()
    assert ("TransformerEngine is not installed. Without it" in captured.err) == bool(code)
    said = "trainer: TransformerEngine is not installed, so layers are Megatron-Core's own"
    assert (said in captured.out) == ("trainer.require_transformer_engine=false" in overrides)


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ((), 3),
        (("trainer.require_transformer_engine=false",), 3),  # Megatron-Core would fail all the same
        (("trainer.device=cpu",), 0),
    ],
)
def test_a_broken_transformer_engine_is_refused_before_anything_starts(
    tmp_path: Path,
    transformer_engine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    code: int,
) -> None:
    transformer_engine.write_text("raise ImportError('undefined symbol: _ZN3')")
    monkeypatch.setattr(validate, "detect_device", lambda: "cuda")
    path = write_run(tmp_path)
    assert main(["check", str(path), "model.dtype=bfloat16", *overrides]) == code
    assert ("undefined symbol: _ZN3" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("shares_gpu", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": "x:1"},
        {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    ],
)
def test_ranks_have_the_settings_of_servers_and_the_allocators_unless_the_user_sets_them(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], shares_gpu: bool
) -> None:
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    names = (*allocator, "NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        os.environ.pop(name)
    os.environ.update(given)
    prepare_rank_environment(4.0, shares_gpu=shares_gpu)
    expected = {"NCCL_CUMEM_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4"}
    if not given.keys() & set(allocator):
        segments = "" if shares_gpu else ",expandable_segments:True"
        expected["PYTORCH_ALLOC_CONF"] = f"pinned_max_round_threshold_mb:1024{segments}"
    assert {name: os.environ[name] for name in names if name in os.environ} == expected | given
