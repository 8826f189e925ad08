"""Asks an advisory service about the packages that `make setup` installs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LISTS = tuple(REQUIREMENTS / f"{name}.txt" for name in ("cpu-nodeps", "cpu", "dev", "sources", "torch-cuda"))
"""All that is pinned; torch.txt has another build of what torch-cuda.txt has."""

SERVICE = "https://api.osv.dev/v1/query"
KNOWN_TO_BE_VULNERABLE = "urllib3==1.24.1"
"""It has had advisories since 2019: a service that has none of them knows nothing about other packages."""


class AuditError(Exception):
    """The service did not answer for every package."""


def audit(lists: Sequence[Path], service: str = SERVICE) -> dict[str, set[str]]:
    """Return the names of the advisories of each package that has some, by `name==version`.

    Raises:
        AuditError: The service cannot be reached, or a package was not looked up.
    """
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command += ["--vulnerability-service", "osv", "--osv-url", service, "--format", "json", "--timeout", "15"]
    for each in lists:
        command += ["--requirement", str(each)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode not in (0, 1) or not done.stdout:  # 1: there are advisories, or it crashed
        raise AuditError((done.stderr.splitlines() or [f"pip-audit ended with {done.returncode}"])[-1])
    packages = json.loads(done.stdout)["dependencies"]
    if skipped := [f"{each['name']}: {each['skip_reason']}" for each in packages if "skip_reason" in each]:
        raise AuditError(f"not looked up: {', '.join(skipped)}")
    return {
        f"{each['name']}=={each['version']}": {found["id"] for found in each["vulns"]}
        for each in packages
        if each["vulns"]
    }


def service_problem(service: str = SERVICE) -> str:
    """Return why the service cannot be asked, or that its answers mean nothing; otherwise nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{KNOWN_TO_BE_VULNERABLE}\n")
        file.flush()
        try:
            found = audit([Path(file.name)], service)
        except (AuditError, subprocess.TimeoutExpired) as error:
            return f"{service} cannot be asked ({str(error).rpartition('Caused by ')[2][:160]})"
    return "" if found else f"{service} knows no advisory of {KNOWN_TO_BE_VULNERABLE}"


def exceptions() -> set[tuple[str, str]]:
    """Return the package and name of each advisory that is accepted, for the reason above its line."""
    lines = (REQUIREMENTS / "advisories.txt").read_text().splitlines()
    pairs = [tuple(line.split()) for line in lines if line and not line.startswith("#")]
    return {(package, advisory) for package, advisory in pairs}
