"""`scripts/check-gpu-environment.sh`, with stand-ins for what it installs and runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bare_machine import BareMachine

SCRIPT = "scripts/check-gpu-environment.sh"
FAKE = """
# Stands in for each program: writes down its call, and fails in the part that a test names.
case "$*" in
  "-c import sysconfig"*) echo "$PACKAGES"; exit ;;
  *"--target "*) rest=$*; rest=${rest#*--target }; mkdir -p "${rest%% *}" ;;
esac
call="${0##*/} $* CUDA=${CUDA_VISIBLE_DEVICES-all}"
echo "$call" >> "$CALLS"
[[ $call != *$FAILS* ]]
"""
PARTS = (
    "nvcc.txt",
    "setup-gpu.sh",
    "dev.txt",
    "driver_stand_in.py",
    "first_kernel --only-imports CUDA= ",
    "not real and not long CUDA= ",
    "test_trainer_",
)


class Machine(BareMachine):
    """A checkout in which everything that the script calls is a stand-in."""

    def __init__(self, folder: Path) -> None:
        lists = ("requirements/nvcc.txt", "requirements/dev.txt")
        super().__init__(folder, SCRIPT, *lists, path="/usr/bin:/bin")
        self.packages = folder / ".venv-gpu" / "packages"
        self.packages.mkdir(parents=True)
        for path in ("bin/python3", "scripts/setup-gpu.sh", ".venv-gpu/bin/python"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(f"#!/bin/bash{FAKE}")
            (folder / path).chmod(0o755)

    def check(self, fails: str = "nothing", **environment: str) -> tuple[int, list[str]]:
        """Run the script; return its exit code and what it called."""
        calls = self.folder / "calls"
        calls.write_text("")
        known = {"CALLS": str(calls), "PACKAGES": str(self.packages), "FAILS": fails}
        done = self.run(SCRIPT, **known, **environment)
        return done.returncode, [f"{line} " for line in calls.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_the_check_ends_with_the_part_that_fails_and_hides_gpus(machine: Machine, number: int) -> None:
    code, calls = machine.check(fails=PARTS[number].strip())
    assert code != 0
    assert len(calls) == number + 1
    assert all(part in call for part, call in zip(PARTS, calls, strict=False))


def test_the_compiler_is_installed_again_when_its_list_changed_or_it_is_not_whole(machine: Machine) -> None:
    everything = len(PARTS)
    nvcc = machine.folder / "requirements" / "nvcc.txt"
    assert machine.check(fails="nvcc.txt")[0] != 0
    assert [len(machine.check()[1]) for _ in range(2)] == [everything, everything - 1]
    nvcc.write_text("nvidia-cuda-nvcc==13.1.0\n")
    assert [len(machine.check()[1]) for _ in range(2)] == [everything, everything - 1]


def test_tools_of_the_tests_replace_nothing_of_the_environment(machine: Machine) -> None:
    assert machine.check()[0] == 0
    code = "import site, sys; site.addsitedir(sys.argv[1]); print(*sys.path[-2:], sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(machine.packages)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(machine.packages), str(machine.packages.parent / "tools")]


def test_tests_of_ones_choice_are_run_in_place_of_the_lanes(machine: Machine) -> None:
    code, calls = machine.check(TESTS="tests/unit -k staleness")
    assert code == 0
    assert len(calls) == len(PARTS) - 1
    assert "--no-loadscope-reorder tests/unit -k staleness CUDA= " in calls[-1]
