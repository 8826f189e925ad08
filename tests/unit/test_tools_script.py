"""`scripts/tools.sh` on machines that have, lack, or shall do without the programs of others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import tools

SCRIPT = Path(__file__).parents[2] / "scripts" / "tools.sh"


class Machine:
    """A checkout, and a PATH that has what a bare system has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "scripts").mkdir()
        shutil.copy(SCRIPT, folder / "scripts")
        for name in ("bash", "cat", "chmod", "dirname", "flock", "grep", "mkdir", "mv", "rm", "sed", "tail"):
            (self.bin / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name} here"))

    def add(self, command: str, script: str = "exit 0") -> None:
        (self.bin / command).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / command).chmod(0o755)

    def run(self, *names: str, without: str = "") -> tuple[int, str]:
        done = subprocess.run(
            ["bash", self.folder / "scripts" / "tools.sh", *names],
            env={"PATH": str(self.bin), "ASYNC_RL_WITHOUT": without},
            capture_output=True,
            text=True,
            timeout=60,
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
    assert "(prometheus promtool)" in said
    assert "ASYNC_RL_WITHOUT=prometheus make test" in said


def test_the_cause_is_shown_when_apt_fails(machine: Machine) -> None:
    machine.add("apt-get", 'echo "E: Could not resolve deb.debian.org" >&2; exit 100')
    machine.add("dpkg")
    code, said = machine.run("chromium")
    assert code == 3
    assert "E: Could not resolve deb.debian.org" in said
    assert "chromium could not be downloaded" in said


def test_what_is_left_out_is_not_looked_for(machine: Machine) -> None:
    assert machine.run(without="prometheus,chromium") == (0, "")


def test_a_name_that_is_none_is_refused(machine: Machine) -> None:
    code, said = machine.run("grafana")
    assert code == 2
    assert "not one of: prometheus chromium" in said


def test_a_package_is_unpacked_when_the_machine_lacks_it(machine: Machine) -> None:
    machine.add("uname", "echo x86_64")
    machine.add(
        "apt-get",
        'case "$*" in\n'
        '*" install "*) echo "Inst prometheus (2.42.0 Debian:12/stable [amd64])" ;;\n'
        '*" download prometheus=2.42.0") echo > prometheus.deb ;;\n'
        "*) exit 1 ;;\nesac",
    )
    machine.add(
        "dpkg",
        'mkdir -p "$3/usr/bin"\n'
        'for name in prometheus promtool; do printf "#!/bin/sh\\nexit 0\\n" > "$3/usr/bin/$name"; '
        'chmod +x "$3/usr/bin/$name"; done',
    )
    (machine.bin / "sh").symlink_to("/bin/sh")
    code, said = machine.run("prometheus")
    assert (code, said.count("\n")) == (0, 1), said
    assert {p.name for p in (machine.folder / ".tools" / "bin").iterdir()} == {"prometheus", "promtool"}
    assert machine.run("prometheus") == (0, "")  # nothing is left to do


def test_a_test_is_skipped_only_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_RL_WITHOUT", "chromium,prometheus")
    with pytest.raises(pytest.skip.Exception, match="leaves out prometheus"):
        tools.program("promtool", "prometheus")
    monkeypatch.setenv("ASYNC_RL_WITHOUT", "chromium")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tools, "_BIN", Path("/nowhere"))
    with pytest.raises(pytest.fail.Exception, match=r"run scripts/tools\.sh"):
        tools.program("promtool", "prometheus")
