"""One contract for all sandbox backends: local ones, real and fake containers, and fakes of services.

That of Modal runs where its package is installed: tests/contract/test_modal_sandboxes.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import tarfile
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agent_loops.sandboxes.protocol import MAX_FILE_BYTES, SandboxRefused, ShellSandbox
from agent_loops.sandboxes.settings import parse_backend
from async_rl.errors import ConfigError, EnvironmentNotReady, SandboxLost, ToolError
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
    settings: Any
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
        elif kind == "modal":
            from tests.support.fake_modal import KEY_ID, fake_modal

            url, machines = await stack.enter_async_context(fake_modal(folder))
            variables = stack.enter_context(pytest.MonkeyPatch.context())
            variables.setenv("MODAL_SERVER_URL", url)
            variables.setenv("MODAL_DISABLE_API_PROXY", "1")
            variables.setenv("MODAL_TOKEN_ID", KEY_ID)
            variables.setenv("MODAL_TOKEN_SECRET", KEY)
        parsed = parse_backend(settings)
        backend = await stack.enter_async_context(parsed.open_backend("a-run"))
        yield Subject(kind, parsed, backend, machines)


SERVICES = ["e2b", "daytona", *(["modal"] if importlib.util.find_spec("modal") else [])]
FAKES = ["containers", *SERVICES]


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


async def test_a_file_that_is_too_large_is_refused_and_the_sandbox_remains(
    subject: Subject,
) -> None:
    async with subject.started() as box:
        assert (await box.exec("head -c 20000000 /dev/zero >/tmp/large")).exit_code == 0
        with pytest.raises(OSError, match="/tmp/large"):
            await box.read_file("/tmp/large")
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


async def test_a_command_may_have_100_000_bytes(subject: Subject) -> None:
    async with subject.started() as box:
        ran = await box.exec(f"echo 'äpfel'; exit 3 # {'#' * 99_900}")
        assert (ran.exit_code, ran.stdout) == (3, "äpfel\n")


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


@pytest.mark.parametrize("subject", FAKES, indirect=True)
async def test_an_unknown_image_is_refused(subject: Subject) -> None:
    with pytest.raises(SandboxRefused):
        await subject.backend.start("async-rl-refused", "missing", TTL_S)
    await subject.backend.end("async-rl-refused")


@pytest.mark.parametrize("subject", FAKES, indirect=True)
async def test_a_block_ends_no_sandbox_and_another_finds_it_by_name(subject: Subject) -> None:
    assert subject.machines is not None
    before = connections()
    async with subject.settings.open_backend("a-run") as backend:
        await backend.start("async-rl-left", "", TTL_S)
        await backend.exec("async-rl-left", "true", timeout_s=5, stdin=b"", max_output_bytes=100)
    async with asyncio.timeout(10):
        while not connections() <= before:  # noqa: ASYNC110 - Modal's client closes its own in a thread
            await asyncio.sleep(0)
    assert len(subject.machines.requested) == 1
    await subject.backend.end("async-rl-left")
    assert not subject.machines.requested


def connections() -> set[int]:
    """The descriptors of this process that are connected, to a service or to a client of one."""
    return {each.fd for each in psutil.Process().net_connections("all") if each.status != "LISTEN"}


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
        case "modal":
            network = asked["definition"]["networkAccess"]["networkAccessType"]
            assert (network, asked["definition"]["timeoutSecs"]) == ("BLOCKED", 600)


@pytest.mark.parametrize("subject", FAKES, indirect=True)
async def test_whatever_fails_beside_the_command_is_a_lost_sandbox(subject: Subject) -> None:
    assert subject.machines is not None
    path = {
        "containers": "/exec",
        "e2b": "/process.Process/Start",
        "daytona": "/process/execute",
        "modal": "/TaskExecStart",
    }[subject.kind]
    # Modal's client repeats what fails in passing.
    statuses = (403, 404, 409) if subject.kind == "modal" else (0, 404, 500, 503)
    async with subject.started() as box:
        for status in statuses:
            subject.machines.faults.append((path, status))
            with pytest.raises(SandboxLost):
                await box.exec("true")
        assert (await box.exec("echo usable")).stdout == "usable\n"


@pytest.mark.parametrize("subject", SERVICES, indirect=True)
async def test_a_missing_key_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(subject.settings.key_env)
    with pytest.raises(ConfigError, match=f"{subject.settings.key_env} is not set"):
        subject.settings.open_backend("a-run")


@pytest.mark.parametrize("subject", SERVICES, indirect=True)
async def test_a_key_is_in_no_error(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(subject.settings.key_env, "sk-a-wrong-key")
    with pytest.raises(EnvironmentNotReady, match=r"no access with .*<key>") as failed:
        async with subject.settings.open_backend("a-run"):
            pass
    assert "sk-a-wrong-key" not in "".join(traceback.format_exception(failed.value))
