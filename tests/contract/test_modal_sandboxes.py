"""Sandboxes of Modal keep the contract of all backends, with the real client and a fake of the service."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.package_environments import python_with

pytestmark = [pytest.mark.long, pytest.mark.needs("pypi")]

ROOT = Path(__file__).parents[2]


def test_modal_keeps_the_contract_of_all_sandbox_backends() -> None:
    contract = "tests/contract/test_sandbox_contract.py"
    ran = subprocess.run(
        [python_with("modal"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "modal", contract],
        cwd=ROOT,
        env={**os.environ, "MODAL_CONFIG_PATH": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout
