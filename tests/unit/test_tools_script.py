"""`scripts/tools.sh` on machines that have, lack, or shall do without the programs of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.bare_machine import BareMachine
from tests.support.environment import leave_out, start_problem

PROGRAMS = "bash cat chmod dirname find flock grep mkdir mv rm sed sh sort tail tr"
"""What the script needs of any system."""


class Machine(BareMachine):
    """A machine that has what a bare system has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "scripts/tools.sh")
        self.link(*PROGRAMS.split())

    def find_tools(self, *names: str, timeout_s: float = 60, **settings: str) -> tuple[int, str]:
        done = self.run("scripts/tools.sh", *names, timeout_s=timeout_s, **settings)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_tests_go_on_without_what_is_missing(machine: Machine) -> None:
    code, said = machine.find_tools()
    assert code == 0
    for tool in ("prometheus", "chromium"):  # the one that is missing does not hide the other
        assert f"Install {tool} so that" in said
        assert "no apt" in (machine.folder / ".tools" / f"{tool}.problem").read_text()
    assert said.count("tests that need it are skipped") == 2
    for command in ("prometheus", "promtool", "chromium"):
        machine.add(command)
    assert machine.find_tools() == (0, "")
    assert list((machine.folder / ".tools").glob("*.problem")) == []
    assert list((machine.folder / ".tools" / "bin").iterdir()) == []


def test_what_is_missing_is_an_error_in_ci(machine: Machine) -> None:
    code, said = machine.find_tools(CI="true")
    assert (code, said.count("ASYNC_RL_WITHOUT=")) == (3, 2)
    for ci in ("true", ""):  # what is left out is not looked for
        assert machine.find_tools(CI=ci, ASYNC_RL_WITHOUT="prometheus,chromium") == (0, "")


APT_GET = """
case "$*" in
  *" install "*) echo "Inst prometheus (2.42.0 Debian:12/stable [amd64])" ;;
  *" download prometheus=2.42.0") echo > prometheus.deb ;;
  *) exit 1 ;;
esac
"""
DPKG = r"""
mkdir -p "$3/usr/bin" && cd "$3/usr/bin"
for name in prometheus promtool; do printf "#!/bin/sh\nexit 0\n" > "$name"; chmod +x "$name"; done
"""


def test_a_package_is_unpacked_when_the_machine_lacks_it(machine: Machine) -> None:
    machine.add("apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    machine.add("dpkg", DPKG)
    machine.add("prometheus", "exit 127")  # it is on the PATH and does not start
    code, said = machine.find_tools("prometheus")
    assert code == 3
    assert "prometheus could not be downloaded (E: Could not resolve deb.debian.org)" in said
    machine.add("apt-get", APT_GET)
    code, said = machine.find_tools("prometheus")
    assert (code, said.count("\n")) == (0, 1), said
    assert {p.name for p in (machine.folder / ".tools" / "bin").iterdir()} == {"prometheus", "promtool"}
    assert machine.find_tools("prometheus") == (0, "")  # nothing is left to do


@pytest.mark.long  # it downloads some 150 MB
@pytest.mark.timeout(900)
@pytest.mark.needs("apt")
@pytest.mark.parametrize("tool", ["prometheus", "chromium"])
def test_a_real_package_is_unpacked_into_an_empty_folder_and_starts(
    tool: str, machine: Machine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for command in ("prometheus", "promtool", "chromium"):
        machine.add(command, "exit 127")  # as if the machine had none
    path = f"{machine.bin}:{os.environ['PATH']}"
    code, said = machine.find_tools(tool, timeout_s=800, **{**os.environ, "PATH": path})
    if "could not be downloaded" in said:
        leave_out(request.node, "apt", said.splitlines()[1])
    assert code == 0, said
    for command in {"prometheus": ("prometheus", "promtool"), "chromium": ("chromium",)}[tool]:
        assert start_problem(str(tmp_path / ".tools" / "bin" / command), command) == ""
