"""A machine whose PATH holds stand-ins, for tests of the scripts that set up the project."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


class BareMachine:
    """A checkout that has a few files only, and a PATH with the commands that a test adds."""

    def __init__(self, folder: Path, *files: str, path: str = "") -> None:
        """Copy `files` of the checkout; `path` follows the folder of added commands on the PATH."""
        self.folder, self.bin = folder, folder / "bin"
        self.path = f"{self.bin}:{path}" if path else str(self.bin)
        self.bin.mkdir()
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, folder / file)

    def add(self, command: str, script: str = "exit 0") -> None:
        (self.bin / command).write_text(f"#!/bin/bash\n{script}\n")
        (self.bin / command).chmod(0o755)

    def link(self, *commands: str) -> None:
        """Add commands that this machine really has."""
        for command in commands:
            found = shutil.which(command)
            assert found, f"there is no {command} here"
            (self.bin / command).symlink_to(found)

    def run(
        self, script: str, *arguments: str, timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash", self.folder / script, *arguments],
            env={"PATH": self.path, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
