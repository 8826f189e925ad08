"""What `make setup` installs: by hash, without conflicts and without known advisories, except listed ones."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.advisories import LISTS, REQUIREMENTS, audit, exceptions

ROOT = Path(__file__).parents[2]
LIST = REQUIREMENTS / "pip-check.txt"
INSTALLED = [*LISTS, REQUIREMENTS / "torch.txt"]
ON_GPUS = [REQUIREMENTS / f"gpu-{which}.txt" for which in ("py311", "py312", "source")]
CONFLICT = re.compile(r"(\S+) \S+ (?:requires|has requirement) ([\w.-]+)")


@pytest.mark.long
@pytest.mark.skipif(
    not (Path(sys.prefix) / "requirements.stamp").exists(), reason="this environment is not from `make setup`"
)
def test_pip_reports_only_conflicts_that_are_listed_with_a_reason() -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    found = {match.groups() if (match := CONFLICT.match(line)) else (line,) for line in lines}
    listed = [
        tuple(line.split()) for line in LIST.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert len(set(listed)) == len(listed)
    assert found - set(listed) == set(), f"fix the versions in requirements/, or list them in {LIST.name}"
    assert set(listed) - found == set(), f"these are solved: take them out of {LIST.name}"


def pins(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("file", [*INSTALLED, *ON_GPUS], ids=lambda file: file.name)
def test_every_package_is_pinned_by_version_and_hash(file: Path) -> None:
    pinned = re.compile(r"[\w.-]+==[\w.+!]+(?:; [^-]+)? --hash=sha256:[0-9a-f]{64}")
    assert pins(file)
    assert [line for line in pins(file) if not pinned.fullmatch(line)] == []


def test_set_up_installs_only_by_hash_what_is_listed() -> None:
    script = (ROOT / "scripts" / "setup.sh").read_text()
    assert 'pinned="--no-deps --require-hashes"' in script
    installs = re.findall(r'^ *install "([^"]+)" (\S+)', script, re.MULTILINE)
    # The project itself is a folder, and installs nothing else.
    assert {options for what, options in installs if what != "async-rl itself"} == {"$pinned"}
    assert 'install "async-rl itself" --no-deps --no-build-isolation --editable' in script


def wheel(folder: Path, name: str) -> str:
    """Write an installable package; return its SHA-256."""
    file = folder / f"{name}-2.13.0-py3-none-any.whl"
    about = f"{name}-2.13.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="set-up refuses other machines")
def test_set_up_stops_with_one_message_when_a_file_is_not_the_pinned_one(tmp_path: Path) -> None:
    for folder in ("scripts", "requirements", "wheels"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    hashes = {name: wheel(tmp_path / "wheels", name) for name in ("torch", "honest", "changed")}
    files = {"torch": "torch-cuda", "honest": "cpu-nodeps", "changed": "cpu"}
    for name, file in files.items():
        (tmp_path / f"requirements/{file}.txt").write_text(f"{name}==2.13.0 --hash=sha256:{hashes[name]}\n")
    (tmp_path / "requirements/torch.txt").write_text("torch==2.13.0 --hash=sha256:" + 64 * "0")
    with (tmp_path / "wheels/changed-2.13.0-py3-none-any.whl").open("ab") as file:
        file.write(b"by somebody")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": f"{sys.base_prefix}/bin/python3",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }
    script = tmp_path / "scripts/setup.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3
    message = done.stderr.splitlines()
    assert len(message) == 2
    refusal = "setup: refused a file that is not the one that requirements/ pins: changed==2.13.0 from"
    assert refusal in message[0]
    assert f"Expected sha256 {hashes['changed']} Got" in message[0]
    assert "make hashes" in message[1]
    assert "Successfully installed honest-2.13.0" in (tmp_path / ".venv/setup.log").read_text()
    assert not (tmp_path / ".venv/requirements.stamp").exists()  # never taken for a finished environment


# -- advisories --


@pytest.mark.long
@pytest.mark.needs("advisories")
@pytest.mark.timeout(900)
def test_pinned_packages_have_no_advisories_but_those_accepted() -> None:
    found = {(package, name) for package, names in audit(LISTS).items() for name in names}
    assert found - exceptions() == set(), "take another version, or accept it in requirements/advisories.txt"
    assert exceptions() - found == set(), "these are solved: take them out of requirements/advisories.txt"
