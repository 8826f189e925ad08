"""A Podman of the test's own, with an image made of busybox, so that no registry is needed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "localhost/async-rl-test:latest"
_APPLETS = (
    "sh",
    "cat",
    "chmod",
    "cp",
    "dd",
    "du",
    "echo",
    "env",
    "head",
    "id",
    "kill",
    "ls",
    "mkdir",
    "nc",
    "ps",
    "sed",
    "rm",
    "setsid",
    "sleep",
    "tail",
    "tar",
    "timeout",
    "wc",
    "wget",
    "yes",
)


@contextmanager
def podman_service() -> Iterator[str]:
    """Serve, with the image; yield the socket."""
    with _folder() as folder:
        _make_image(folder)
        path = folder / "podman.sock"
        command = [*_podman(folder), "system", "service", "--time=0", f"unix://{path}"]
        process = subprocess.Popen(command, env=_environment(folder))
        try:
            while not _answers(path):
                assert process.poll() is None
                time.sleep(0.05)  # Podman tells nobody
            yield str(path)
        finally:
            process.terminate()
            process.wait()
            _run(folder, "rm", "--all", "--force", "--time=0")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder with a short path, as Podman demands."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def problem() -> str:
    """Why no container can run here; empty if one can."""
    if missing := [name for name in ("podman", "busybox") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not on the PATH"
    with _folder() as folder:
        try:
            _make_image(folder)
            _run(folder, "run", "--rm", "--network=none", "--pids-limit=64", "--memory=64m", IMAGE, "ls")
        except subprocess.CalledProcessError as error:
            return f"podman: {error.stderr.decode(errors='replace').strip()[-300:]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return ""


def _make_image(folder: Path) -> None:
    archive = folder / "image.tar"
    with tarfile.open(archive, "w") as writer:
        writer.add(str(shutil.which("busybox")), "bin/busybox")
        for applet in _APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            writer.addfile(link)
        for name, mode in ((".", 0o755), ("tmp", 0o1777)):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, mode
            writer.addfile(made)
    _run(folder, "import", str(archive), IMAGE)


def _run(folder: Path, *words: str) -> None:
    subprocess.run(
        [*_podman(folder), *words], check=True, capture_output=True, env=_environment(folder), timeout=120
    )


def _podman(folder: Path) -> list[str]:
    return [
        "podman",
        f"--root={folder}/storage",
        f"--runroot={folder}/run",
        "--storage-driver=vfs",
        "--cgroup-manager=cgroupfs",
        *(["--runtime=runc"] if shutil.which("runc") else []),  # also runs on cgroups of both versions
    ]


def _environment(folder: Path) -> dict[str, str]:
    """An environment whose limits no container may raise: the test's user may not either."""
    settings = folder / "containers.conf"
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n[engine]\n'
        'events_logger = "file"\n'
    )
    return {**os.environ, "CONTAINERS_CONF": str(settings)}
