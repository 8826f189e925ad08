"""Command-line agents in containers: real ones, which reach nothing but the endpoint, and those of a fake."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_loops.harness import HarnessLoop
from agent_loops.harness.sandbox_place import _pack_again, _unpack
from agent_loops.sandboxes.settings import parse_backend
from async_rl.errors import AgentLoopError, ConfigError, NotScored, SandboxLost
from async_rl.types import Task
from tests.support.fake_container_engine import fake_container_engine
from tests.support.fake_machines import FakeMachines
from tests.support.harness import attempt, program, source_of
from tests.support.podman import IMAGE, podman_service

pytestmark = pytest.mark.real_time

ASKS = """
ask() { wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" \
  --header "Content-Type: application/json" \
  --post-data '{"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}' \
  "$OPENAI_BASE_URL/chat/completions"; }
"""


def notes_of(bench: Any) -> dict[str, Any]:
    """What `async-rl inspect` shows of the attempt."""
    (notes,) = (turn.metadata["harness"] for turn in bench.session._dialogue.turns if turn.metadata)
    return notes


def shell(source: str) -> dict[str, Any]:
    """A program of busybox that can `ask`."""
    return {"command": ["sh", "-c", ASKS + source]}


def python(source: str) -> dict[str, Any]:
    """A program of this host's Python, for the containers of the fake."""
    given = program("import signal\n" + source)
    return {**given, "command": ["python3", *given["command"][1:]]}


def scored_by(tmp_path: Path, source: str, **fields: Any) -> dict[str, Any]:
    """A score by a shell script outside of the workspace."""
    (tmp_path / "score.sh").write_text(source)
    return {"files": str(tmp_path / "score.sh"), "command": ["sh", "{files}/score.sh"], **fields}


async def build_image(socket: str, dockerfile: str) -> str:
    """Build an image, and return its name."""
    archive, name = io.BytesIO(), f"async-rl-test:{zlib.crc32(dockerfile.encode())}"
    with tarfile.open(fileobj=archive, mode="w") as writer:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        writer.addfile(member, io.BytesIO(dockerfile.encode()))
    async with parse_backend({"kind": "containers", "socket": socket}).open_backend("") as backend:
        await backend.build_image(name, archive.getvalue())
    return name


@pytest.fixture(scope="module")
def podman_socket() -> Iterator[str]:
    with podman_service() as path:
        yield path


@pytest.fixture
def containers(podman_socket: str, tmp_path: Path) -> dict[str, Any]:
    """The setting `sandbox` for real containers without a network."""
    backend = {"kind": "containers", "socket": podman_socket, "image": IMAGE, "memory_mb": 64}
    return {"backend": backend, "folder": tmp_path / "log"}


@pytest_asyncio.fixture
async def fake(tmp_path: Path) -> AsyncIterator[tuple[dict[str, Any], FakeMachines]]:
    """The same for those of a fake, which have the network of this host."""
    (tmp_path / "engine").mkdir()
    async with fake_container_engine(tmp_path / "engine") as (path, machines):
        backend = {"kind": "containers", "socket": path, "image": "python:3.11", "network": "host"}
        yield {"backend": backend, "folder": tmp_path / "log", "image_field": "image"}, machines


@pytest.mark.needs("podman")
@pytest.mark.real
async def test_a_program_in_a_container_asks_edits_and_is_scored(containers: Any, tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", a__txt="one\n", b__txt="kept\n")
    does = "ask | sed 's/.*Hello.*/answered/'; echo two >a.txt; echo log >$HOME/log; rm -f c; echo said >&2"
    loop = HarnessLoop(
        shell(does),
        workspace=source,
        setup=["sh", "-c", "echo made >c"],
        sandbox=containers,
        collect=["~/log"],
        score=scored_by(tmp_path, '[ "$(cat a.txt)" = two ] && echo 0.75', result="last_line"),
    )
    async with loop:
        bench, reason = await attempt(loop, "Hello.")
    assert reason is None
    assert bench.session.completion.reported == {"reward": 0.75}
    notes = notes_of(bench)
    assert (notes["stdout"], notes["stderr"]) == ("answered", "said")
    assert notes["changed"] == "~ a.txt"
    assert "-one\n+two" in notes["diff"]
    assert notes["files"] == {"log": "log\n"}


@pytest.mark.needs("podman")
@pytest.mark.real
async def test_a_program_in_a_container_reaches_nothing_but_the_endpoint(containers: Any) -> None:
    """Not this host, where another server listens on all addresses, and no other machine."""
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        here = socket.gethostbyname(socket.gethostname())
        does = (
            f"for host in 127.0.0.1 {here} 10.0.2.2 10.88.0.1 192.0.2.1; do "
            f"wget -q -T 2 -O - http://$host:{port}/ && echo reached $host; done; "
            "sed -n 's/^ *\\([a-z0-9]*\\):.*/\\1/p' /proc/net/dev; ask >answer; echo asked $?"
        )
        loop = HarnessLoop(shell(does), sandbox=containers)
        async with loop:
            bench, _ = await attempt(loop, "Hello.")
    assert notes_of(bench)["stdout"] == "lo\nasked 0"


@pytest.mark.needs("podman")
@pytest.mark.real
async def test_what_a_program_has_started_in_a_container_is_over_when_the_score_begins(
    containers: Any, tmp_path: Path
) -> None:
    """Also in sessions of its own; and a container lives on, whatever a program kills."""
    loop = HarnessLoop(
        shell("kill -9 -1; setsid sleep 1234 & setsid sh -c 'while :; do sleep 5; done' & ask"),
        sandbox=containers,
        score=scored_by(
            tmp_path, "ps >&2; ps | sed -n '/sleep [1]234/p;/sleep [5]/p' | wc -l", result="last_line"
        ),
    )
    async with loop:
        bench, _ = await attempt(loop, "Hello.")
    assert bench.session.completion.reported == {"reward": 0.0}


IN_IMAGE = "cat a.txt; echo two >a.txt; rm b.txt; echo >.git/config; cd ..; ask"


@pytest.mark.needs("podman")
@pytest.mark.real
async def test_a_program_works_in_a_folder_of_the_image(
    containers: Any, podman_socket: str, tmp_path: Path
) -> None:
    made = "mkdir -p /testbed/.git && cd /testbed && echo one >a.txt && cp a.txt b.txt && cp a.txt .c"
    image = await build_image(podman_socket, f"FROM {IMAGE}\nRUN {made}\n")
    loop = HarnessLoop(
        shell(IN_IMAGE),
        sandbox={**containers, "workspace": "/testbed", "image_field": "image"},
        collect=["*.txt"],
        score=scored_by(tmp_path, 'echo "$PWD $WORKSPACE" >&2; cat a.txt >&2; exec test ! -e b.txt'),
    )
    async with loop:
        bench, _ = await attempt(loop, "Hello.", metadata={"image": image})
        with pytest.raises(AgentLoopError, match="/testbed"):  # which the default image has not
            await attempt(loop)
    assert bench.session.completion.reported == {"reward": 1.0}
    notes = notes_of(bench)
    assert notes["stdout"].startswith("one\n")
    assert notes["changed"] == "~ a.txt\n- b.txt"
    assert "-one\n+two" in notes["diff"]
    assert notes["files"] == {"a.txt": "two\n"}


async def test_a_workspace_of_the_image_has_a_size_and_is_seen_by_a_function(fake: Any) -> None:
    sandbox, machines = fake
    (folder := machines.image_path("task:1") / "tmp/testbed").mkdir(parents=True)
    (folder / "a").write_text("12345")
    loop = HarnessLoop(
        python("Path('b').write_bytes(b'67' if ask('Hi') == 'Hello.' else os.urandom(1 << 21))"),
        sandbox={**sandbox, "workspace": "/tmp/testbed"},
        score=f"{__name__}:files_of",
        max_workspace_mb=1,
    )
    async with loop:
        bench, _ = await attempt(loop, "Hello.", metadata={"image": "task:1"})
        full, reason = await attempt(loop, "Fill.", metadata={"image": "task:1"})
        (machines.image_path("task:1") / "tmp/testbed/.git").write_bytes(os.urandom(1 << 21))
        with pytest.raises(AgentLoopError, match="max_workspace_mb"):
            await attempt(loop, metadata={"image": "task:1"})
    assert bench.session.completion.reported == {"reward": 7.0}
    assert notes_of(bench)["changed"] == "+ b"
    assert reason == "failed"
    assert full.session.completion.reported == {"reward": 0.0}


TAMPERS = "echo false >a.txt; echo 'echo true' >/bin/show; ask"


@pytest.mark.needs("podman")
@pytest.mark.real
@pytest.mark.parametrize("inside", ["", "/testbed"])
async def test_a_program_that_was_tampered_with_does_not_score_in_a_fresh_container(
    containers: Any, podman_socket: str, tmp_path: Path, inside: str
) -> None:
    makes = "mkdir /testbed && echo 'cat a.txt' >/bin/show && chmod +x /bin/show"
    image = await build_image(podman_socket, f"FROM {IMAGE}\nRUN {makes}\n")
    containers["backend"]["image"] = image
    rewards = []
    for fresh in (False, True):
        loop = HarnessLoop(
            shell(TAMPERS),
            sandbox={**containers, "workspace": inside},
            score=scored_by(tmp_path, '[ "$(show)" = true ]', fresh=fresh),
        )
        async with loop:
            bench, _ = await attempt(loop, "Hello.")
        rewards.append(bench.session.completion.reported["reward"])
    assert rewards == [1.0, 0.0]


async def test_a_fresh_container_has_the_workspace_and_nothing_else(fake: Any, tmp_path: Path) -> None:
    """Its links too, but not what the program has removed; and it waits for no other than its own."""
    sandbox, machines = fake
    (folder := machines.image_path("task:1") / "tmp/testbed").mkdir(parents=True)
    for name in ("a", "removed"):
        (folder / name).write_text("12345")
    absent = "[ ! -e removed ] && [ ! -e ../other ] && [ ! -e ../async-rl/home/state ]"
    loop = HarnessLoop(
        python(
            "ask('Hi'); Path('d').mkdir(); os.symlink('../a', 'd/soft'); os.link('a', 'hard')\n"
            "os.remove('removed'); Path('../other').touch(); Path(os.environ['HOME'], 'state').touch()"
        ),
        sandbox={**sandbox, "workspace": "/tmp/testbed", "max_open": 1},
        score=scored_by(tmp_path, f'[ "$(cat d/soft hard)" = 1234512345 ] && {absent}', fresh=True),
    )
    async with loop:
        bench, _ = await attempt(loop, "Hello.", metadata={"image": "task:1"})
    assert bench.session.completion.reported == {"reward": 1.0}
    assert machines.num_made == 2


async def test_a_lost_sandbox_fails_the_attempt_and_is_no_score(fake: Any, tmp_path: Path) -> None:
    sandbox, machines = fake
    loop = HarnessLoop(
        python("ask('Hi')"), sandbox=sandbox, score=scored_by(tmp_path, "exit 0"), nonzero_exit="zero"
    )
    async with loop:
        for fault in (("/exec/", 0), ("/archive", 503)):
            machines.faults.append(fault)
            with pytest.raises(SandboxLost):
                await attempt(loop, "Hello.")
        bench, _ = await attempt(loop, "Hello.")
    assert bench.session.completion.reported == {"reward": 1.0}
    assert not machines.requested


async def test_a_program_that_fills_its_place_is_ended_and_scored_0(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loops.harness.sandbox_place._MEASURED_S", 0.01)
    loop = HarnessLoop(
        python("ask('Hi'); Path('big').write_bytes(bytes(range(256)) * 8192); signal.pause()"),
        sandbox=fake[0],
        score=scored_by(tmp_path, "exit 0"),
        max_workspace_mb=1,
    )
    async with loop:
        bench, reason = await attempt(loop, "Hello.")
    assert reason == "failed"
    assert bench.session.completion.reported == {"reward": 0.0}
    assert notes_of(bench)["ended"] == "size"


async def test_a_score_that_takes_too_long_is_0(fake: Any, tmp_path: Path) -> None:
    endless = scored_by(tmp_path, "sleep 1000", timeout_s=0.01)
    loop = HarnessLoop(python("ask('Hi')"), sandbox=fake[0], score=endless)
    async with loop:
        bench, _ = await attempt(loop, "Hello.")
    assert bench.session.completion.reported == {"reward": 0.0, "score_timeout": 1.0}


@pytest.mark.parametrize("code", [75, 126, 137])
async def test_no_failure_of_the_infrastructure_is_a_score(fake: Any, tmp_path: Path, code: int) -> None:
    loop = HarnessLoop(python("ask('Hi')"), sandbox=fake[0], score=scored_by(tmp_path, f"exit {code}"))
    async with loop:
        with pytest.raises(NotScored, match="could not be computed"):
            await attempt(loop, "Hello.")


def files_of(task: Task, workspace: Path) -> float:
    return sum(len(path.read_text()) for path in workspace.iterdir())


async def test_a_function_scores_a_copy_and_a_task_names_its_image(fake: Any) -> None:
    sandbox, _ = fake
    loop = HarnessLoop(
        python("Path('a').write_text('12345'); os.symlink('/etc/passwd', 'b'); ask('Hi')"),
        sandbox=sandbox,
        score=f"{__name__}:files_of",
    )
    async with loop:
        bench, _ = await attempt(loop, "Hello.", metadata={"image": "another"})
        with pytest.raises(SandboxLost, match="missing"):
            await attempt(loop, metadata={"image": "missing"})
    assert bench.session.completion.reported == {"reward": 5.0}


async def test_nothing_listens_where_the_process_is_not_that_of_the_container(fake: Any) -> None:
    """An engine in a virtual machine counts processes of its own."""
    sandbox, _ = fake
    backend = {**sandbox["backend"], "network": False}
    loop = HarnessLoop(python("ask('Hi')"), sandbox={**sandbox, "backend": backend})
    async with loop:
        with pytest.raises(SandboxLost, match="is not that of the container"):
            await attempt(loop, "Hello.")


@pytest.mark.parametrize(
    ("sandbox", "fields", "message"),
    [
        pytest.param({"backend": "local"}, {}, "runs single commands", marks=pytest.mark.needs("namespaces")),
        ({"ttl_s": 100}, {}, "ttl_s is 100; expected more than 2100"),
        ({"imagefield": "a"}, {}, "imagefield"),
        (
            None,
            {"program": {"command": ["sh"]}, "score": {"command": ["true"], "fresh": True}},
            "fresh goes with sandbox",
        ),
        ({}, {"score": {"function": f"{__name__}:files_of", "fresh": True}}, "fresh goes with a command"),
        ({"workspace": "testbed"}, {}, "expected a folder of the image"),
        ({"workspace": "/testbed"}, {"workspace": "/tmp"}, "exclude each other"),
        ({}, {"program": {"command": ["python3"], "imports": ["json"]}}, "exclude each other"),
    ],
)
def test_wrong_arguments_are_refused(sandbox: Any, fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HarnessLoop(**{"program": "codex", "sandbox": sandbox, **fields})


def test_links_of_a_policy_lead_nothing_out_of_a_workspace(tmp_path: Path) -> None:
    """Those that are unpacked first would be passed through by what is unpacked later."""
    folder = tmp_path / "workspace"
    with tarfile.open(tmp_path / "workspace.tar", "w") as writer:
        for name, link in (("./x", "/usr/bin"), ("./x/sh", "/tmp/sh"), ("./y", "/usr/bin"), ("./z", "/z")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, link
            writer.addfile(member)
        writer.addfile(tarfile.TarInfo("./y/sh"))
    _unpack(tmp_path / "workspace.tar", folder, 1 << 20)
    _pack_again(folder, tmp_path / "moved.tar")
    with tarfile.open(tmp_path / "moved.tar") as reader:
        names = [member.name for member in reader]
    assert names == ["y", "y/sh", "./x", "./z"]


def test_what_comes_back_makes_only_plain_files_below_the_copy(tmp_path: Path) -> None:
    def unpacked(*members: tuple[str, bytes, str]) -> list[str]:
        with tarfile.open(tmp_path / "archive", "w") as writer:
            for name, kind, link in members:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, link
                writer.addfile(member)
        _unpack(tmp_path / "archive", copy, 1 << 20)
        return sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))

    outside, copy = tmp_path / "outside", tmp_path / "copy"
    outside.mkdir()
    link = ("./a", tarfile.SYMTYPE, str(outside))
    assert unpacked(link, ("./a/b", tarfile.REGTYPE, "")) == ["a", "a/b"]
    assert unpacked(("b", tarfile.FIFOTYPE, ""), ("c", tarfile.CHRTYPE, "")) == []
    for name in ("/etc/passwd", "../archive", "a/../../x"):
        for member in ((name, tarfile.REGTYPE, ""), ("a", tarfile.LNKTYPE, name)):
            with pytest.raises(AgentLoopError, match="cannot be copied"):
                unpacked(member)
    assert list(outside.iterdir()) == []
