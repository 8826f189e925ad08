"""`scripts/tools.sh` on machines that have, lack, or shall do without the programs of others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.bare_machine import BareMachine
from tests.support.environment import leave_out, start_problem

ROOT = Path(__file__).parents[2]


PROGRAMS = [
    "bash",
    "cat",
    "chmod",
    "dirname",
    "find",
    "flock",
    "grep",
    "mkdir",
    "mv",
    "rm",
    "sed",
    "sh",
    "sort",
    "tail",
    "tr",
]
"""What the script needs of any system."""


class Machine(BareMachine):
    """A machine that has what a bare system has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "scripts/tools.sh")
        self.link(*PROGRAMS)

    def find_tools(self, *names: str, timeout_s: float = 60, **settings: str) -> tuple[int, str]:
        done = self.run("scripts/tools.sh", *names, timeout_s=timeout_s, **settings)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_said_or_done_when_the_path_has_all(machine: Machine) -> None:
    for command in ("prometheus", "promtool", "chromium"):
        machine.add(command)
    assert machine.find_tools() == (0, "")
    assert list((machine.folder / ".tools" / "bin").iterdir()) == []


def test_what_to_do_is_said_when_there_is_no_apt(machine: Machine) -> None:
    machine.add("prometheus")  # without promtool it is not all
    code, said = machine.find_tools("prometheus")
    assert code == 3
    assert "no apt" in said
    assert "(prometheus promtool) are on the PATH" in said
    assert "ASYNC_RL_WITHOUT=prometheus" in said


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


def test_what_is_missing_is_an_error_in_ci(machine: Machine) -> None:
    code, said = machine.find_tools(CI="true")
    assert (code, said.count("ASYNC_RL_WITHOUT=")) == (3, 2)
    for ci in ("true", ""):  # what is left out is not looked for
        assert machine.find_tools(CI=ci, ASYNC_RL_WITHOUT="prometheus,chromium") == (0, "")


def test_the_cause_is_shown_when_apt_fails(machine: Machine) -> None:
    machine.add("apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    machine.add("dpkg")
    code, said = machine.find_tools("chromium")
    assert code == 3
    assert "chromium could not be downloaded (E: Could not resolve deb.debian.org)" in said


def test_a_name_that_is_none_is_refused(machine: Machine) -> None:
    code, said = machine.find_tools("grafana")
    assert code == 2
    assert "not one of: prometheus chromium" in said


def offer(machine: Machine, tool: str, unpack: str) -> None:
    """Give a machine an apt that has the package of a tool, and a dpkg that unpacks it by lines of shell."""
    machine.add(
        "apt-get",
        'case "$*" in\n'
        f'*" install "*) echo "Inst {tool} (2.42.0 Debian:12/stable [amd64])" ;;\n'
        f'*" download {tool}=2.42.0") echo > {tool}.deb ;;\n'
        "*) exit 1 ;;\nesac",
    )
    machine.add("dpkg", f'mkdir -p "$3/usr/bin" && cd "$3"\n{unpack}')


def test_a_package_is_unpacked_when_the_machine_lacks_it(machine: Machine) -> None:
    offer(
        machine,
        "prometheus",
        'for name in prometheus promtool; do printf "#!/bin/sh\\nexit 0\\n" > "usr/bin/$name"; '
        'chmod +x "usr/bin/$name"; done',
    )
    machine.add("prometheus", "exit 127")  # it is on the PATH and does not start
    code, said = machine.find_tools("prometheus")
    assert (code, said.count("\n")) == (0, 1), said
    assert {p.name for p in (machine.folder / ".tools" / "bin").iterdir()} == {"prometheus", "promtool"}
    assert machine.find_tools("prometheus") == (0, "")  # nothing is left to do


# A program that starts only if it finds its libraries, which lie as those of Debian's chromium do.
NEEDS_LIBRARIES = r"""
mkdir -p lib/any usr/lib/any/pulseaudio
echo > lib/any/libdbus-1.so.3; echo > usr/lib/any/libpulse.so.0
echo > usr/lib/any/pulseaudio/libpulsecommon-16.1.so
cat > usr/bin/chromium <<'END'
#!/bin/sh
find_library() {
  IFS=:
  for folder in $LD_LIBRARY_PATH; do [ ! -f "$folder/$1" ] || return 0; done
  echo "no $1" >&2
  exit 127
}
find_library libdbus-1.so.3; find_library libpulse.so.0; find_library libpulsecommon-16.1.so
END
chmod +x usr/bin/chromium
"""


def test_libraries_are_found_in_whatever_folder_they_were_unpacked(machine: Machine) -> None:
    offer(machine, "chromium", NEEDS_LIBRARIES)
    assert machine.find_tools("chromium")[0] == 0


def test_the_programs_own_words_are_shown_when_it_does_not_start(machine: Machine) -> None:
    offer(machine, "chromium", NEEDS_LIBRARIES.replace("echo > lib/any/libdbus-1.so.3;", ""))
    code, said = machine.find_tools("chromium")
    assert code == 3
    assert "chromium was unpacked into .tools and does not start: no libdbus-1.so.3" in said


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


def test_ci_starts_without_what_the_machine_brings(machine: Machine) -> None:
    """CI's own script, up to where it would set up and test."""
    (machine.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", machine.folder / ".ci")
    (machine.folder / ".tools" / "bin").mkdir(parents=True)
    machine.link("mktemp", "uname")
    for command in ("git", "python3.11", "prometheus", "promtool", "chromium"):
        machine.add(command)
    machine.add("make", 'echo "$1 CI=$CI"; [ "$1" = check ] || { ls .tools; scripts/tools.sh; }')
    done = machine.run(".ci/run")
    assert done.stdout.endswith("check CI=true\ntest CI=true\n")
    assert done.stderr.count("and this machine has no apt") == 2
    assert done.returncode == 3
