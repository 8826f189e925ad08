"""Task folders of Harbor in real containers: images that are named, copied to and built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loops.environment import EnvironmentLoop
from agent_loops.testing import ScriptedSession, make_task
from async_rl.errors import SandboxLost
from tests.support.podman import IMAGE, podman_service

pytestmark = [pytest.mark.real_time, pytest.mark.real, pytest.mark.needs("podman")]

SHOWS = "```bash\npwd; cat data.txt /made; echo $A\n```"


@pytest.fixture(scope="module")
def podman_socket() -> Iterator[str]:
    with podman_service() as path:
        yield path


def task_in(folder: Path, dockerfile: str, task: str = "") -> Path:
    """A task whose tests want a file in its working folder; its image has no bash."""
    for name in ("environment", "tests"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "task.toml").write_text(task)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "data.txt").write_text("data\n")
    script = "if [ -e answer.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return folder


async def played(socket: str, log: Path, folder: Path, *turns: str) -> ScriptedSession:
    backend = {"kind": "containers", "socket": socket, "memory_mb": 64}
    sandbox: dict[str, Any] = {"backend": backend, "folder": log}
    session = ScriptedSession(*turns, task=make_task(metadata={"folder": str(folder)}))
    async with EnvironmentLoop("harbor", sandbox=sandbox) as loop:
        await loop.run(session.task, session)
    return session


@pytest.mark.parametrize(
    ("dockerfile", "task", "shown"),
    [
        (f"FROM {IMAGE}\nWORKDIR /work\nENV A=1\nCOPY . /work", "", "/work\ndata\ncat: can't open '/made'"),
        (f"FROM {IMAGE}\nRUN echo made >/made\nENV A=1\nWORKDIR /work\nCOPY . .", "", "/work\ndata\nmade\n1"),
        (
            "FROM nowhere",
            f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/home"',
            "/home\ncat: can't open",
        ),
    ],
    ids=["copied", "built", "named"],
)
async def test_an_environment_is_what_its_task_describes(
    podman_socket: str, tmp_path: Path, dockerfile: str, task: str, shown: str
) -> None:
    folder, log = task_in(tmp_path, dockerfile, task), tmp_path / "log"
    session = await played(podman_socket, log, folder, SHOWS, "```sh\n>answer.txt\n```", "Done.")
    assert session.messages[2]["content"].startswith(shown)
    assert session.reported["reward"] == 1.0
    assert (await played(podman_socket, log, folder, "Done.")).reported["reward"] == 0.0


async def test_a_dockerfile_that_fails_fails_the_attempt(podman_socket: str, tmp_path: Path) -> None:
    folder = task_in(tmp_path, f"FROM {IMAGE}\nRUN exit 3")
    with pytest.raises(SandboxLost, match="exit status 3"):
        await played(podman_socket, tmp_path / "log", folder)
