"""`scripts/tools.sh` on machines that have, lack, or shall do without the programs of others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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


class Machine:
    """A checkout, and a PATH that has what a bare system has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "tools.sh", folder / "scripts")
        for name in PROGRAMS:
            (self.bin / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name} here"))

    def add(self, command: str, script: str = "exit 0") -> None:
        (self.bin / command).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / command).chmod(0o755)

    def run(self, *names: str, timeout_s: float = 60, **settings: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", self.folder / "scripts" / "tools.sh", *names],
            env={"PATH": str(self.bin), **settings},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_said_or_done_when_the_path_has_all(machine: Machine) -> None:
    for command in ("prometheus", "promtool", "chromium"):
        machine.add(command)
    assert machine.run() == (0, "")
    assert list((machine.folder / ".tools" / "bin").iterdir()) == []


def test_what_to_do_is_said_when_there_is_no_apt(machine: Machine) -> None:
    machine.add("prometheus")  # without promtool it is not all
    code, said = machine.run("prometheus")
    assert code == 3
    assert "no apt" in said
    assert "(prometheus promtool) are on the PATH" in said
    assert "ASYNC_RL_WITHOUT=prometheus" in said


def test_tests_go_on_without_what_is_missing(machine: Machine) -> None:
    code, said = machine.run()
    assert code == 0
    for tool in ("prometheus", "chromium"):  # the one that is missing does not hide the other
        assert f"Install {tool} so that" in said
        assert "no apt" in (machine.folder / ".tools" / f"{tool}.problem").read_text()
    assert said.count("tests that need it are skipped") == 2
    for command in ("prometheus", "promtool", "chromium"):
        machine.add(command)
    assert machine.run() == (0, "")
    assert list((machine.folder / ".tools").glob("*.problem")) == []


def test_what_is_missing_is_an_error_in_ci(machine: Machine) -> None:
    code, said = machine.run(CI="true")
    assert (code, said.count("ASYNC_RL_WITHOUT=")) == (3, 2)
    assert machine.run(CI="true", ASYNC_RL_WITHOUT="prometheus,chromium") == (0, "")


def test_the_cause_is_shown_when_apt_fails(machine: Machine) -> None:
    machine.add("apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    machine.add("dpkg")
    code, said = machine.run("chromium")
    assert code == 3
    assert "chromium could not be downloaded (E: Could not resolve deb.debian.org)" in said


def test_what_is_left_out_is_not_looked_for(machine: Machine) -> None:
    assert machine.run(ASYNC_RL_WITHOUT="prometheus,chromium") == (0, "")


def test_a_name_that_is_none_is_refused(machine: Machine) -> None:
    code, said = machine.run("grafana")
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
    code, said = machine.run("prometheus")
    assert (code, said.count("\n")) == (0, 1), said
    assert {p.name for p in (machine.folder / ".tools" / "bin").iterdir()} == {"prometheus", "promtool"}
    assert machine.run("prometheus") == (0, "")  # nothing is left to do


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
    assert machine.run("chromium")[0] == 0


def test_the_programs_own_words_are_shown_when_it_does_not_start(machine: Machine) -> None:
    offer(machine, "chromium", NEEDS_LIBRARIES.replace("echo > lib/any/libdbus-1.so.3;", ""))
    code, said = machine.run("chromium")
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
    code, said = machine.run(tool, timeout_s=800, **{**os.environ, "PATH": path})
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
    for name in ("mktemp", "uname"):
        (machine.bin / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name} here"))
    for command in ("git", "python3.11", "prometheus", "promtool", "chromium"):
        machine.add(command)
    machine.add("make", 'echo "$1 CI=$CI"; ls .tools 2>/dev/null; scripts/tools.sh')
    done = subprocess.run(
        ["bash", machine.folder / ".ci" / "run"],
        env={"PATH": str(machine.bin)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "test CI=true\ntools:" in done.stdout + done.stderr
    assert done.stderr.count("and this machine has no apt") == 2
    assert done.returncode == 3
