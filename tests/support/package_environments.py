"""Packages of other projects, installed beside those of `make setup` in an environment of their own.

A file `tests/requirements/NAME.txt` pins them. Their versions may differ from ours, so they are not installed
into `.venv`: the environment sees `.venv`'s packages behind its own, and a test runs programs with its
interpreter.

```
 python_with("environments") ─► /tmp/async-rl-tests-UID/environments-DIGEST/bin/python    made once, kept
```
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def python_with(name: str) -> Path:
    """The interpreter of an environment with the packages of `tests/requirements/NAME.txt`."""
    pinned = REQUIREMENTS / f"{name}.txt"
    ours = sysconfig.get_path("purelib")
    made_of = (pinned.read_text(), Path(__file__).read_text(), sys.version, ours)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:12]
    folder = _cache() / f"{name}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with (_cache() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist ask at the same time
        if not stamp.exists():
            _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
            own = subprocess.check_output(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
            # Behind its own packages, which may have other versions.
            (Path(own) / "packages_of_async_rl.pth").write_text(f"{ours}\n")
            # All of them, even if `.venv` happens to have one: it may change after this.
            options = ("--quiet", "--no-deps", "--ignore-installed", "-r", str(pinned))
            _run(str(python), "-m", "pip", "install", *options)
            stamp.touch()
    return python


def _cache() -> Path:
    folder = Path(tempfile.gettempdir(), f"async-rl-tests-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else: remove it"
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
