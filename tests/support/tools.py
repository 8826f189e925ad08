"""Programs of others that tests start: from the PATH, or from where `scripts/tools.sh` put them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_BIN = Path(__file__).parents[2] / ".tools" / "bin"


def program(command: str, tool: str) -> str:
    """Path of a command, for example `promtool` of `prometheus`.

    A test that needs a tool is skipped only when the environment says to do without it.
    """
    if tool in os.environ.get("ASYNC_RL_WITHOUT", "").split(","):
        pytest.skip(f"ASYNC_RL_WITHOUT leaves out {tool}")
    found = shutil.which(command) or shutil.which(command, path=_BIN)
    if found is None:
        pytest.fail(
            f"{command} is neither on the PATH nor in .tools/bin: run scripts/tools.sh, or do without it: "
            f"ASYNC_RL_WITHOUT={tool}",
            pytrace=False,
        )
    return found
