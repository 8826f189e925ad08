"""One contract for all sandbox backends: local ones, real and fake containers, and fakes of services."""

from __future__ import annotations

import asyncio
import io
import tarfile
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_loops.sandboxes.protocol import MAX_FILE_BYTES, SandboxRefused, ShellSandbox
from agent_loops.sandboxes.settings import parse_backend
from async_rl.errors import EnvironmentNotReady, SandboxLost, ToolError
from tests.support.fake_container_engine import fake_container_engine
from tests.support.fake_machines import FakeMachines
from tests.support.fake_sandbox_services import KEY, fake_daytona, fake_e2b
from tests.support.podman import IMAGE, podman_service

pytestmark = pytest.mark.real_time

TTL_S = 600.0


@dataclass
class Subject:
    """A backend under test, and the fake behind it, if any."""

    kind: str
    backend: Any
    machines: FakeMachines | None
    num_started: int = 0

    @asynccontextmanager
    async def started(self, image: str = "", limit: int = 1000) -> AsyncIterator[ShellSandbox]:
        self.num_started += 1
        name = f"async-rl-test-{self.num_started}"
        await self.backend.start(name, image, TTL_S)
        try:
            yield ShellSandbox(
                self.backend,
                name,
                max_output_bytes=limit,
                take_snapshot=lambda name: self.backend.snapshot(name, "abc123"),
            )
        finally:
            await self.backend.end(name)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Subject]:
    machines: FakeMachines | None = None
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"kind": kind}
        if kind == "containers":
            socket, machines = await stack.enter_async_context(fake_container_engine(folder))
            settings |= {"socket": socket, "image": "python:3.11"}
        elif kind == "podman":
            settings = {"kind": "containers", "socket": str(folder), "image": IMAGE, "memory_mb": 64}
        elif kind == "e2b":
            url, machines = await stack.enter_async_context(fake_e2b(folder))
            settings |= {"api_url": url, "sandbox_url": url}
        elif kind == "daytona":
            url, machines = await stack.enter_async_context(fake_daytona(folder))
            settings |= {"api_url": url}
        backend = await stack.enter_async_context(parse_backend(settings).open_backend("a-run"))
        yield Subject(kind, backend, machines)


FAKES = ["containers", "e2b", "daytona"]


REAL = [
    pytest.param("local", marks=pytest.mark.needs("namespaces")),
    pytest.param("podman", marks=[pytest.mark.needs("podman"), pytest.mark.real]),
]


@pytest_asyncio.fixture(params=[*REAL, *FAKES])
async def subject(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Subject]:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    monkeypatch.setattr("agent_loops.sandboxes.remote._LOOK_AGAIN_S", 0.0)
    folder = request.getfixturevalue("podman_socket") if request.param == "podman" else tmp_path
    async with opened(request.param, folder) as subject:
        yield subject


@pytest.fixture(scope="module")
def podman_socket() -> Iterator[Path]:
    with podman_service() as socket:
        yield Path(socket)


async def test_outputs_and_exit_code_of_a_command_are_its_result(subject: Subject) -> None:
    async with subject.started() as box:
        ran = await box.exec("echo out; echo 'äpfel' >&2; exit 3")
        assert (ran.exit_code, ran.stdout, ran.stderr, ran.timed_out) == (3, "out\n", "äpfel\n", False)
        assert (await box.exec("exit 0")).exit_code == 0
        assert (await box.exec("kill -9 $$")).exit_code == 137
        assert not (await box.exec("kill -9 $$")).timed_out


async def test_files_last_from_command_to_command_but_not_to_another_sandbox(subject: Subject) -> None:
    async with subject.started() as box, subject.started() as other:
        assert (await box.exec("echo kept > /tmp/file")).exit_code == 0
        assert (await box.exec("cat /tmp/file")).stdout == "kept\n"
        assert (await other.exec("cat /tmp/file")).exit_code != 0


async def test_files_are_written_and_read_byte_by_byte(subject: Subject) -> None:
    data = bytes(range(256)) * 5000
    async with subject.started() as box:
        await box.write_file("/tmp/data", data)
        assert await box.read_file("/tmp/data") == data
        await box.write_file("/tmp/data", "")
        assert await box.read_file("/tmp/data") == b""
        await box.write_file("/tmp/a/new/folder", "text")
        assert (await box.exec("cat /tmp/a/new/folder")).stdout == "text"
        with pytest.raises(FileNotFoundError):
            await box.read_file("/tmp/missing")
        with pytest.raises(OSError, match="/tmp/data/below-a-file"):
            await box.write_file("/tmp/data/below-a-file", b"x")
        with pytest.raises(OSError, match="at most"):
            await box.write_file("/tmp/data", bytes(MAX_FILE_BYTES + 1))
        assert (await box.exec("echo usable")).stdout == "usable\n"


async def test_a_command_reads_its_stdin_and_otherwise_nothing(subject: Subject) -> None:
    async with subject.started() as box:
        assert (await box.exec("cat", stdin="some\ninput")).stdout == "some\ninput"
        assert (await box.exec("cat")).stdout == ""
        assert ".in" not in (await box.exec("ls -A /tmp/")).stdout


async def test_a_time_limit_ends_the_command_and_not_the_sandbox(subject: Subject) -> None:
    async with subject.started() as box:
        ran = await box.exec("echo before; sleep 1000", timeout_s=1.0)
        assert (ran.timed_out, ran.exit_code, ran.stdout) == (True, 137, "before\n")
        assert (await box.exec("echo usable")).stdout == "usable\n"


@pytest.mark.parametrize("subject", REAL, indirect=True)
async def test_processes_end_and_the_sandbox_does_not(subject: Subject) -> None:
    async with subject.started() as box:
        await box.exec("setsid sh -c 'while :; do echo on >/tmp/file; done' >/dev/null 2>&1 &")
        await box.end_processes()
        assert (await box.exec("rm -f /tmp/file; sleep 0.2; cat /tmp/file")).exit_code != 0


async def test_outputs_are_bounded(subject: Subject) -> None:
    async with subject.started(limit=1000) as box:
        ran = await box.exec("head -c 300000 /dev/zero; echo e >&2")
        assert (ran.exit_code, len(ran.stdout), ran.stderr, ran.truncated) == (0, 1000, "e\n", True)
        assert not (await box.exec("head -c 1000 /dev/zero")).truncated


async def test_a_command_that_no_program_could_receive_is_refused(subject: Subject) -> None:
    async with subject.started() as box:
        for command in ("echo \0", "#" * 200_000):
            with pytest.raises(ToolError):
                await box.exec(command)
        assert (await box.exec("echo usable")).stdout == "usable\n"


async def test_a_snapshot_starts_others_with_its_files(subject: Subject) -> None:
    async with subject.started() as box:
        await box.write_file("/tmp/file", "kept")
        if subject.kind == "local":
            with pytest.raises(NotImplementedError):
                await box.snapshot()
            return
        image = await box.snapshot()
    async with subject.started(image) as other:
        assert await other.read_file("/tmp/file") == b"kept"
    await subject.backend.end_snapshot("abc123")
    await subject.backend.end_snapshot("abc123")
    assert subject.machines is None or not subject.machines.images


async def test_an_ended_sandbox_is_lost_and_may_end_again(subject: Subject) -> None:
    async with subject.started() as box:
        await subject.backend.end(box.name)
        with pytest.raises(SandboxLost):
            await box.exec("true")
        with pytest.raises(SandboxLost):
            await box.read_file("/tmp/file")
        await subject.backend.end(box.name)
    await subject.backend.end("async-rl-never-was")


@pytest.mark.real
@pytest.mark.needs("podman")
async def test_an_image_is_built_once(podman_socket: Path) -> None:
    """The second archive would fail, as it does under another name."""
    dockerfile = f"FROM {IMAGE}\nRUN echo made > /made\nWORKDIR /work\n".encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        archive.addfile(member, io.BytesIO(dockerfile))
    broken = context.getvalue().replace(b"RUN echo", b"RUN ohce")
    async with opened("podman", podman_socket) as subject:
        build = subject.backend.build_image
        await asyncio.gather(
            build("async-rl-test-built", context.getvalue()), build("async-rl-test-built", broken)
        )
        async with subject.started("async-rl-test-built") as box:
            assert (await box.exec("cat /made; pwd")).stdout == "made\n/work\n"
        with pytest.raises(SandboxRefused, match=r"async-rl-test-broken.*RUN ohce"):
            await build("async-rl-test-broken", broken)


@pytest.mark.real
@pytest.mark.needs("podman")
async def test_a_container_has_no_network_and_no_privileges(podman_socket: Path) -> None:
    async with opened("podman", podman_socket) as subject, subject.started() as box:
        assert (await box.exec("cat /proc/net/dev")).stdout.count(":") == 1  # loopback alone
        assert "CapEff:\t0000000000000000" in (await box.exec("cat /proc/self/status")).stdout


@pytest.mark.parametrize("subject", FAKES, indirect=True)
async def test_a_sandbox_has_no_network_and_a_time_to_live_by_default(subject: Subject) -> None:
    assert subject.machines is not None
    async with subject.started():
        (asked,) = subject.machines.requested.values()
    match subject.kind:
        case "containers":
            assert asked["HostConfig"]["NetworkMode"] == "none"
            assert asked["HostConfig"]["CapDrop"] == ["ALL"]
            assert asked["HostConfig"]["AutoRemove"]
            assert asked["Entrypoint"][-1] == "600"
        case "e2b":
            assert (asked["allow_internet_access"], asked["timeout"], asked["autoPause"]) == (
                False,
                600,
                False,
            )
        case "daytona":
            assert (asked["networkBlockAll"], asked["ttlMinutes"]) == (True, 10)


@pytest.mark.parametrize("subject", FAKES, indirect=True)
async def test_whatever_fails_beside_the_command_is_a_lost_sandbox(subject: Subject) -> None:
    assert subject.machines is not None
    path = {"containers": "/exec", "e2b": "/process.Process/Start", "daytona": "/process/execute"}[
        subject.kind
    ]
    async with subject.started() as box:
        for status in (0, 404, 500, 503):
            subject.machines.faults.append((path, status))
            with pytest.raises(SandboxLost):
                await box.exec("true")
        assert (await box.exec("echo usable")).stdout == "usable\n"


@pytest.mark.parametrize("subject", ["e2b", "daytona"], indirect=True)
async def test_a_key_is_in_no_error(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = subject.kind
    monkeypatch.setenv(f"{kind.upper()}_API_KEY", "sk-a-wrong-key")
    settings = {"kind": kind, "api_url": subject.backend._api}
    with pytest.raises(EnvironmentNotReady, match=r"401.*<key>") as failed:
        async with parse_backend(settings).open_backend("a-run"):
            pass
    assert "sk-a-wrong-key" not in "".join(traceback.format_exception(failed.value))
