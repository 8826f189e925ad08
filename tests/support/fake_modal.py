"""A fake of Modal's gRPC services, as far as sandboxes use them; it wants the token `KEY_ID`, `KEY`.

The package `modal` has the messages, so only its environment can import this (tests/requirements/modal.txt).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from grpclib import GRPCError, Status
from grpclib.events import RecvRequest, listen
from grpclib.server import Server
from modal._utils.grpc_testing import patch_mock_servicer
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as inside_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.support.fake_machines import FakeMachines
from tests.support.fake_sandbox_services import KEY

KEY_ID = "ak-an-id"
STATUSES = {403: Status.PERMISSION_DENIED, 404: Status.NOT_FOUND, 409: Status.FAILED_PRECONDITION}
"""Those that the client does not repeat, as HTTP would number them."""
TOKEN = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 1e6}).encode()).decode().rstrip("=")


@asynccontextmanager
async def fake_modal(folder: Path) -> AsyncIterator[tuple[str, FakeMachines]]:
    """Serve both the API and what is inside sandboxes; yield the address and the sandboxes."""
    machines = FakeMachines(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    inside = _Inside(machines)
    server = Server([_Api(machines, url), inside])

    async def check_request(event: RecvRequest) -> None:
        metadata = event.metadata
        if "TaskCommandRouter" in event.method_name:
            assert metadata["authorization"] == f"Bearer .{TOKEN}."
        elif (metadata["x-modal-token-id"], metadata["x-modal-token-secret"]) != (KEY_ID, KEY):
            raise GRPCError(Status.UNAUTHENTICATED, f"no access with {metadata['x-modal-token-secret']}")
        if (status := machines.fault_of(event.method_name)) is not None:
            raise GRPCError(STATUSES[status], "a fault")

    listen(server, RecvRequest, check_request)
    await server.start(sock=listener)
    try:
        yield url, machines
    finally:
        server.close()
        await server.wait_closed()
        await inside.close()


def unary(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[None]]:
    """Turn a function from a request to a response into a method of a service."""

    async def method(service: Any, stream: Any) -> None:
        await stream.send_message(await answer(service, await stream.recv_message()))

    return method


def _missing(what: str) -> GRPCError:
    return GRPCError(Status.NOT_FOUND, f"there is no {what}")


@patch_mock_servicer
class _Api(ModalClientBase):  # type: ignore[misc]
    def __init__(self, machines: FakeMachines, url: str) -> None:
        self._machines, self._url = machines, url

    @unary
    async def AppGetOrCreate(self, request: Any) -> Any:
        assert request.app_name == "async-rl"
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    @unary
    async def AuthTokenGet(self, request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=f".{TOKEN}.")

    @unary
    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    @unary
    async def ImageGetOrCreate(self, request: Any) -> Any:
        name = request.image.dockerfile_commands[0].removeprefix("FROM ")
        kind = "FAILURE" if name == "missing" else "SUCCESS"
        result = api_pb2.GenericResult(status=f"GENERIC_STATUS_{kind}", exception=f"{name}: {kind}")
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{name.replace(':', '-')}", result=result)

    @unary
    async def ImageFromId(self, request: Any) -> Any:
        if request.image_id not in self._machines.images:
            raise _missing("image")
        return api_pb2.ImageFromIdResponse(image_id=request.image_id)

    @unary
    async def ImageDelete(self, request: Any) -> Any:
        if not self._machines.remove_image(request.image_id):
            raise _missing("image")
        return Empty()

    @unary
    async def SandboxCreateV2(self, request: Any) -> Any:
        assert request.app_id == "ap-1"
        name = request.definition.name
        self._machines.make(name, MessageToDict(request), request.definition.image_id)
        access = api_pb2.CommandRouterAccess(url=self._url, jwt=f".{TOKEN}.")
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=f"sb-{name}", task_id=f"ta-{name}", command_router_access=access
        )

    @unary
    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        assert request.app_name == "async-rl"
        if request.sandbox_name not in self._machines.requested:
            raise _missing("sandbox")
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=f"sb-{request.sandbox_name}")

    @unary
    async def SandboxGetFromName(self, request: Any) -> Any:
        raise _missing("sandbox")  # of the older kind

    @unary
    async def SandboxTerminateV2(self, request: Any) -> Any:
        self._machines.remove(request.sandbox_id.removeprefix("sb-"))
        return api_pb2.SandboxTerminateResponse()


class _Exec:
    """A program that runs, with a pipe as its input."""

    def __init__(self, machines: FakeMachines, key: str, words: list[str]) -> None:
        self._machines, self._key, self._words = machines, key, words
        self._reads, writes = os.pipe()
        self.stdin = os.fdopen(writes, "wb", buffering=0)
        self.ended = asyncio.ensure_future(self._run())

    async def _run(self) -> tuple[int, bytes, bytes]:
        try:
            return await self._machines.run(self._key, *self._words, stdin=self._reads)
        finally:
            os.close(self._reads)
            self.stdin.close()


@patch_mock_servicer
class _Inside(TaskCommandRouterBase):  # type: ignore[misc]
    def __init__(self, machines: FakeMachines) -> None:
        self._machines = machines
        self._execs: dict[str, _Exec] = {}

    async def close(self) -> None:
        for each in self._execs.values():
            each.ended.cancel()
            with suppress(asyncio.CancelledError):
                await each.ended

    def _key(self, request: Any) -> str:
        if (key := request.task_id.removeprefix("ta-")) not in self._machines.requested:
            raise _missing("sandbox")
        return str(key)

    @unary
    async def TaskExecStart(self, request: Any) -> Any:
        key = self._key(request)
        if request.exec_id not in self._execs:
            self._execs[request.exec_id] = _Exec(self._machines, key, list(request.command_args))
        return inside_pb2.TaskExecStartResponse()

    @unary
    async def TaskExecStdinWrite(self, request: Any) -> Any:
        stdin = self._execs[request.exec_id].stdin
        await asyncio.to_thread(stdin.write, request.data)
        if request.eof:
            stdin.close()
        return inside_pb2.TaskExecStdinWriteResponse()

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        self._key(request)
        _, *outputs = await self._execs[request.exec_id].ended
        is_error = request.file_descriptor == inside_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        output = outputs[is_error]
        for begin in range(request.offset, len(output), 65_536):
            data = output[begin : begin + 65_536]
            await stream.send_message(inside_pb2.TaskExecStdioReadResponse(data=data))

    @unary
    async def TaskExecWait(self, request: Any) -> Any:
        code, *_ = await self._execs[request.exec_id].ended
        status = {"code": code} if code >= 0 else {"signal": -code}
        return inside_pb2.TaskExecWaitResponse(**status)

    @unary
    async def TaskSnapshotFilesystem(self, request: Any) -> Any:
        assert request.ttl_seconds > 0
        image = f"im-{request.snapshot_id}"
        self._machines.keep(self._key(request), image)
        return inside_pb2.TaskSnapshotFilesystemResponse(image_id=image)
