"""Sandboxes of Modal, by its own client: the service has no HTTP API.

The client runs in a thread with an event loop of its own, and repeats what fails in passing; whatever else it
raises is a `SandboxLost`. Files are read and written by commands, because the client's calls for files put
no limit on what they read, and raise the same error for a folder and for a service that fails.

**Source**: the package modal 1.6 (`modal.sandbox`, `modal.container_process`, `modal.experimental`).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final, Self

from msgspec import Meta

from agent_loops.sandboxes.http_calls import REQUEST_S, without_secrets
from agent_loops.sandboxes.protocol import (
    GRACE_S,
    MAX_FILE_BYTES,
    ExecResult,
    Output,
    SandboxRefused,
    limited_command,
    ran_too_long,
)
from agent_loops.sandboxes.remote import RemoteSettings, read_key
from async_rl.errors import EnvironmentNotReady, SandboxLost
from async_rl.runtime.supervision import finished, run_together

_START_S: Final = 600.0
"""Modal builds an image of a registry when a sandbox first needs it."""
_SNAPSHOT_TTL_S: Final = 30 * 24 * 3600
"""Images have no names, so no process finds the snapshots of a killed one: the service removes them then."""
_CLOSE_S: Final = 20.0
_MAX_ARGUMENT_BYTES: Final = 60_000
"""The client refuses arguments of more than 64 KiB, all together."""
_STDIN_BYTES: Final = 1 << 20
_MAX_ERROR_BYTES: Final = 2_000
_NO_FILE: Final = 3
_READ: Final = f'[ -f "$1" ] || exit {_NO_FILE}; exec head -c "$2" "$1"'
_WRITE: Final = '{ mkdir -p "$1" && cat >"$2"; } || { cat >/dev/null; exit 1; }'
"""Reads all of its input also if it cannot write it."""


class ModalSettings(
    RemoteSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="modal", tag_field="kind"
):
    """How to reach Modal."""

    image: str = ""
    """An image of a registry, or the id of one of Modal's (`im-…`); empty takes Debian with Python."""
    app: Annotated[str, Meta(min_length=1)] = "async-rl"
    """The app of Modal to which the sandboxes belong; it is made if it is missing."""
    key_id_env: Annotated[str, Meta(min_length=1)] = "MODAL_TOKEN_ID"
    """The environment variable with the id of the token."""
    key_env: Annotated[str, Meta(min_length=1)] = "MODAL_TOKEN_SECRET"
    """The environment variable with the secret of the token."""

    def open_backend(self, run: str) -> ModalBackend:
        """Return what runs the sandboxes of a run.

        Raises:
            ConfigError: There is no key.
            EnvironmentNotReady: The package is not installed.
        """
        spec = importlib.util.find_spec("modal")
        if spec is None or spec.origin is None:  # none, or a mere folder of this name
            raise EnvironmentNotReady(
                "sandboxes of Modal need the package `modal`, which is not installed: run "
                "`pip install -e '.[modal]'` in async_rl's checkout"
            )
        return ModalBackend(self, read_key(self.key_id_env), read_key(self.key_env), run)


class ModalBackend:
    """Runs sandboxes of Modal, whose names we choose."""

    _client: Any

    def __init__(self, settings: ModalSettings, key_id: str, key: str, run: str) -> None:
        """Connect to nothing yet."""
        self._modal = importlib.import_module("modal")
        self._delete_image = importlib.import_module("modal.experimental").image_delete
        errors = self._modal.exception
        self._not_found = errors.NotFoundError
        self._passing = errors.ConflictError
        self._final = (
            errors.AuthError,
            errors.ImageBuildError,
            errors.InvalidError,
            errors.NotFoundError,
            errors.PermissionDeniedError,
            errors.UnimplementedError,
        )
        self._settings = settings
        self._key = (key_id, key)
        self._run = run
        self._sandboxes: dict[str, Any] = {}
        self._snapshots: dict[str, str] = {}
        """The ids of images by the names of snapshots."""

    async def __aenter__(self) -> Self:
        try:
            async with self._understood("connect"):
                self._client = await self._modal.Client.from_credentials.aio(*self._key)
            try:
                async with self._understood("find the app"):
                    self._app = await self._modal.App.lookup.aio(
                        self._settings.app, client=self._client, create_if_missing=True
                    )
            except BaseException:
                await finished(self._close(), limit_s=_CLOSE_S)
                raise
        except SandboxLost as error:
            raise EnvironmentNotReady(f"sandboxes: {error}") from None
        return self

    async def __aexit__(self, *error: object) -> None:
        await finished(self._close(), limit_s=_CLOSE_S)

    async def _close(self) -> None:
        """Close all connections: the client has one to the service and one to each sandbox."""
        for sandbox in self._sandboxes.values():
            await sandbox.detach.aio()
        self._sandboxes.clear()
        await self._client.__aexit__(None, None, None)

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Implements `SandboxBackend.start`; an image of a registry is built first."""
        seconds = math.ceil(ttl_s)
        async with self._understood("start a sandbox", _START_S):
            self._sandboxes[name] = await self._modal.Sandbox.create.aio(
                *("sleep", str(seconds)),
                name=name,
                tags={"async-rl-run": self._run} if self._run else None,
                image=self._image(image or self._settings.image),
                timeout=seconds,
                block_network=not self._settings.network,
                app=self._app,
                client=self._client,
            )
        await self._run_program(name, "true", limit_s=_START_S)  # waits until it can run commands

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Implements `SandboxBackend.exec`.

        The service has no limit for outputs, and they may be held open by what the command has left running.
        So they go into files of which the first part is printed.
        """
        token = f"/tmp/.{secrets.token_hex(8)}"
        source = "/dev/null"
        if stdin:
            source = f"{token}.in"
            await self.write_file(name, source, stdin)
        data = command.encode(errors="replace")
        if len(data) > _MAX_ARGUMENT_BYTES:
            await self.write_file(name, f"{token}.sh", data)
            data = f'eval "$(cat {token}.sh; rm -f {token}.sh)"'.encode()
        out, err, head = f"{token}.out", f"{token}.err", f"head -c {max_output_bytes + 1}"
        script = (
            f'"$@" >{out} 2>{err}; code=$?; {head} {out}; {head} {err} >&2; rm -f {out} {err}; exit $code'
        )
        clock = asyncio.get_running_loop().time
        begin = clock()
        exit_code, output = await self._run_program(
            *(name, "sh", "-c", script, "sh", *limited_command(data.decode(), timeout_s, source)),
            limit_s=timeout_s + GRACE_S,
            max_output_bytes=max_output_bytes,
        )
        return output.result(exit_code, timed_out=ran_too_long(exit_code, clock() - begin, timeout_s))

    async def end_processes(self, name: str) -> None:
        """Implements `SandboxBackend.end_processes`."""
        raise NotImplementedError("Modal ends a sandbox only as a whole")

    async def read_file(self, name: str, path: str) -> bytes:
        """Implements `SandboxBackend.read_file`."""
        words = ("sh", "-c", _READ, "sh", path, str(MAX_FILE_BYTES + 1))
        exit_code, output = await self._run_program(name, *words, max_output_bytes=MAX_FILE_BYTES)
        if exit_code == _NO_FILE:
            raise FileNotFoundError(2, "no such file", path)
        if exit_code:
            raise OSError(f"{path} cannot be read: {_told(output)}")
        if output.truncated:
            raise OSError(f"{path} is no file of at most {MAX_FILE_BYTES} bytes")
        return output.data(1)

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Implements `SandboxBackend.write_file`."""
        words = ("sh", "-c", _WRITE, "sh", os.path.dirname(path), path)
        exit_code, output = await self._run_program(name, *words, stdin=data)
        if exit_code:
            raise OSError(f"{path} cannot be written: {_told(output)}")

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Implements `SandboxBackend.snapshot`."""
        sandbox = self._sandbox(name)
        async with self._understood("take a snapshot"):
            image = await sandbox.snapshot_filesystem.aio(ttl=_SNAPSHOT_TTL_S)
        self._snapshots[snapshot] = image.object_id
        return str(image.object_id)

    async def end(self, name: str) -> None:
        """Implements `SandboxBackend.end`."""
        async with self._understood("end a sandbox"):
            with suppress(self._not_found):
                sandbox = self._sandboxes.get(name) or await self._modal.Sandbox.from_name.aio(
                    self._settings.app, name, client=self._client
                )
                await sandbox.terminate.aio()
                await sandbox.detach.aio()
        self._sandboxes.pop(name, None)

    async def end_snapshot(self, snapshot: str) -> None:
        """Implements `SandboxBackend.end_snapshot`, for snapshots of this block."""
        if (image := self._snapshots.get(snapshot)) is not None:
            async with self._understood("remove a snapshot"):
                with suppress(self._not_found):
                    await self._delete_image.aio(image, client=self._client)
            del self._snapshots[snapshot]

    async def _run_program(
        self,
        name: str,
        *words: str,
        stdin: bytes | None = None,
        limit_s: float = REQUEST_S,
        max_output_bytes: int = _MAX_ERROR_BYTES,
    ) -> tuple[int, Output]:
        """Run a program to its end; return its exit code and what it wrote."""
        sandbox, output = self._sandbox(name), Output(max_output_bytes)

        async def read(descriptor: int, stream: Any) -> None:
            async for data in stream:
                output.add(descriptor, data)

        async with self._understood("run a command", limit_s):
            process = await sandbox.exec.aio(*words, text=False)
            if stdin is not None:
                for begin in range(0, len(stdin), _STDIN_BYTES):
                    process.stdin.write(stdin[begin : begin + _STDIN_BYTES])
                    await process.stdin.drain.aio()
                process.stdin.write_eof()
                await process.stdin.drain.aio()
            await run_together([("stdout", read(1, process.stdout)), ("stderr", read(2, process.stderr))])
            exit_code = int(await process.wait.aio())
        return exit_code, output

    def _image(self, image: str) -> Any:
        if not image:
            return None
        if image.startswith("im-"):
            return self._modal.Image.from_id(image, client=self._client)
        return self._modal.Image.from_registry(image)

    def _sandbox(self, name: str) -> Any:
        if (sandbox := self._sandboxes.get(name)) is None:
            raise SandboxLost(f"sandbox {name} has ended")
        return sandbox

    @asynccontextmanager
    async def _understood(self, what: str, limit_s: float = REQUEST_S) -> AsyncIterator[None]:
        """Limit the time of calls of the client, and turn whatever they raise.

        Raises:
            SandboxRefused: A repetition would not help.
            SandboxLost: There was no answer, or another error.
        """
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise SandboxLost(f"Modal did not {what} within {limit_s:g} s") from None
        except Exception as error:
            is_final = isinstance(error, self._final) and not isinstance(error, self._passing)
            told = f"{type(error).__name__}: {without_secrets(str(error), self._key)}"
            raise (SandboxRefused if is_final else SandboxLost)(f"Modal did not {what}: {told}") from None


def _told(output: Output) -> str:
    return output.data(2).decode(errors="replace").strip()
