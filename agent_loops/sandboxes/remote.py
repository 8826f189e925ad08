"""Sandboxes of services: E2B and Daytona, each by its own HTTP API.

Keys come from environment variables and appear in no log, error or file. A service ends a sandbox by itself
after its time to live, also when nobody is left to end it.

**Source**: the clients of the services on PyPI, e2b 2.63 (`e2b.api.client`, `e2b.envd`) and daytona 0.226
(`daytona_api_client_async`, `daytona_toolbox_api_client_async`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import os
import secrets
import shlex
import urllib.parse
from typing import Annotated, Any, Final, NamedTuple, Self

import aiohttp
import msgspec
from msgspec import Meta

from agent_loops.sandboxes.http_calls import HttpCalls
from agent_loops.sandboxes.protocol import (
    GRACE_S,
    ExecResult,
    Output,
    limited_command,
    ran_too_long,
)
from async_rl.errors import ConfigError, EnvironmentNotReady, SandboxLost

_E2B_PORT: Final = 49983
"""The port of the agent of E2B inside a sandbox."""
_MAX_ENVELOPE_BYTES: Final = 8 << 20
_LOOK_AGAIN_S: Final = 0.5
"""Between two looks at a sandbox that is starting: Daytona's API sends no event."""


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all services have in common."""

    image: str = ""
    """The template (E2B) or snapshot (Daytona); empty takes the service's default."""
    network: bool = False
    """Whether programs may reach the internet."""


class E2BSettings(
    RemoteSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="e2b", tag_field="kind"
):
    """How to reach E2B, or a server with its API."""

    key_env: Annotated[str, Meta(min_length=1)] = "E2B_API_KEY"
    """The environment variable with the key."""
    domain: str = "e2b.app"
    api_url: str = ""
    """Empty takes `https://api.DOMAIN`."""
    sandbox_url: str = ""
    """Where all sandboxes are reached; empty takes the address of each below the domain."""

    def open_backend(self, run: str) -> E2BBackend:
        """Return what runs the sandboxes of a run.

        Raises:
            ConfigError: There is no key.
        """
        return E2BBackend(self, read_key(self.key_env), run)


class DaytonaSettings(
    RemoteSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="daytona", tag_field="kind"
):
    """How to reach Daytona, or a server with its API."""

    key_env: Annotated[str, Meta(min_length=1)] = "DAYTONA_API_KEY"
    """The environment variable with the key."""
    api_url: str = "https://app.daytona.io/api"

    def open_backend(self, run: str) -> DaytonaBackend:
        """Return what runs the sandboxes of a run.

        Raises:
            ConfigError: There is no key.
        """
        return DaytonaBackend(self, read_key(self.key_env), run)


def read_key(variable: str) -> str:
    """Return a key of a service from an environment variable.

    Raises:
        ConfigError: The variable is not set.
    """
    if not (key := os.environ.get(variable, "")):
        raise ConfigError(f"sandboxes: the environment variable {variable} is not set; it holds the key")
    return key


class _RemoteBackend:
    """The connections of a service, and how errors at its entry are reported."""

    _calls: HttpCalls

    def __init__(self, what: str, headers: dict[str, str], probe: str) -> None:
        """Connect to nothing yet.

        Args:
            what: The service, for messages.
            headers: The key.
            probe: An address that answers those who have the key.
        """
        self._what = what
        self._headers = headers
        self._probe = probe

    async def __aenter__(self) -> Self:
        self._calls = HttpCalls(self._what, aiohttp.TCPConnector(limit=0), self._headers)
        try:
            await self._calls.request("GET", self._probe, params={"limit": "1"})
        except SandboxLost as error:
            await self._calls.close()
            raise EnvironmentNotReady(f"sandboxes: {error}") from error
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._calls.close()

    async def end_processes(self, name: str) -> None:
        """Implements `SandboxBackend.end_processes`."""
        raise NotImplementedError(f"{self._what} ends a sandbox only as a whole")


class _E2BSandbox(NamedTuple):
    """How to reach the agent inside a sandbox."""

    sandbox_id: str
    url: str
    headers: dict[str, str]


class E2BBackend(_RemoteBackend):
    """Runs sandboxes of E2B. The service chooses their ids, so our names are kept in their metadata."""

    def __init__(self, settings: E2BSettings, key: str, run: str) -> None:
        """Connect to nothing yet."""
        self._api = settings.api_url.rstrip("/") or f"https://api.{settings.domain}"
        super().__init__("E2B", {"X-API-KEY": key}, f"{self._api}/v2/sandboxes")
        self._settings = settings
        self._run = run
        self._sandboxes: dict[str, _E2BSandbox] = {}

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Implements `SandboxBackend.start`."""
        body = {
            "templateID": image or self._settings.image or "base",
            "timeout": math.ceil(ttl_s),
            "autoPause": False,
            "allow_internet_access": self._settings.network,
            "metadata": {"async-rl.name": name, "async-rl.run": self._run},
        }
        made = await self._calls.request_json(
            "POST", f"{self._api}/v2/sandboxes", json=body, headers={"Idempotency-Key": name}
        )
        sandbox_id, domain = made["sandboxID"], made.get("domain") or self._settings.domain
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(_E2B_PORT)}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = token
        url = self._settings.sandbox_url.rstrip("/") or f"https://{_E2B_PORT}-{sandbox_id}.{domain}"
        self._sandboxes[name] = _E2BSandbox(sandbox_id, url, headers)

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Implements `SandboxBackend.exec`: a stream of the Connect protocol, in JSON."""
        source = "/dev/null"
        if stdin:
            source = f"/tmp/.{secrets.token_hex(8)}.in"
            await self.write_file(name, source, stdin)
        program, *arguments = limited_command(command, timeout_s, source)
        message = msgspec.json.encode({"process": {"cmd": program, "args": arguments}, "stdin": False})
        sandbox = self._sandbox(name)
        clock = asyncio.get_running_loop().time
        begin, output = clock(), Output(max_output_bytes)
        async with self._calls.open_response(
            "POST",
            f"{sandbox.url}/process.Process/Start",
            data=b"\0" + len(message).to_bytes(4, "big") + message,
            headers={
                **sandbox.headers,
                "Content-Type": "application/connect+json",
                "Connect-Protocol-Version": "1",
            },
            limit_s=timeout_s + GRACE_S,
        ) as response:
            while True:
                flags, event = await _read_envelope(response.content)
                if flags & 2:
                    raise SandboxLost(f"sandbox {name} ended a command: {event.get('error')}")
                event = event.get("event", {})
                for descriptor, stream in ((1, "stdout"), (2, "stderr")):
                    if stream in (data := event.get("data", {})):
                        output.add(descriptor, base64.b64decode(data[stream]))
                if (end := event.get("end")) is not None:
                    break
        exit_code = int(end.get("exitCode", 0))
        exit_code = 137 if exit_code < 0 else exit_code  # by a signal
        return output.result(exit_code, timed_out=ran_too_long(exit_code, clock() - begin, timeout_s))

    async def read_file(self, name: str, path: str) -> bytes:
        """Implements `SandboxBackend.read_file`."""
        sandbox = self._sandbox(name)
        status, body = await self._calls.request_file(
            f"{sandbox.url}/files", path, headers=sandbox.headers, may_be=(400, 404)
        )
        if status != 200:
            await self._check_runs(name)
            raise FileNotFoundError(2, "no such file", path)
        return body

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Implements `SandboxBackend.write_file`."""
        sandbox, form = self._sandbox(name), aiohttp.FormData()
        form.add_field("file", io.BytesIO(data), filename=os.path.basename(path))
        status, _ = await self._calls.request(
            "POST",
            f"{sandbox.url}/files",
            params={"path": path},
            data=form,
            headers=sandbox.headers,
            may_be=(400, 404, 500, 507),
        )
        if status != 200:
            await self._check_runs(name)
            raise OSError(f"{path} cannot be written")

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Implements `SandboxBackend.snapshot`."""
        url = f"{self._api}/sandboxes/{self._sandbox(name).sandbox_id}/snapshots"
        made = await self._calls.request_json("POST", url, json={"name": snapshot})
        return str(made["snapshotID"])

    async def end(self, name: str) -> None:
        """Implements `SandboxBackend.end`."""
        if (sandbox := self._sandboxes.get(name)) is not None:
            ids = [sandbox.sandbox_id]
        else:
            wanted = urllib.parse.urlencode({"async-rl.name": name})
            parameters = {"metadata": wanted, "state": "running,paused"}
            listed = await self._calls.request_json("GET", f"{self._api}/v2/sandboxes", params=parameters)
            ids = [each["sandboxID"] for each in listed]
        for sandbox_id in ids:
            await self._calls.request("DELETE", f"{self._api}/sandboxes/{sandbox_id}", may_be=(404,))
        self._sandboxes.pop(name, None)

    async def end_snapshot(self, snapshot: str) -> None:
        """Implements `SandboxBackend.end_snapshot`."""
        await self._calls.request("DELETE", f"{self._api}/templates/{snapshot}", may_be=(404,))

    def _sandbox(self, name: str) -> _E2BSandbox:
        if (sandbox := self._sandboxes.get(name)) is None:
            raise SandboxLost(f"sandbox {name} has ended")
        return sandbox

    async def _check_runs(self, name: str) -> None:
        await self._calls.request("GET", f"{self._api}/sandboxes/{self._sandbox(name).sandbox_id}")


async def _read_envelope(stream: aiohttp.StreamReader) -> tuple[int, dict[str, Any]]:
    """Return the flags and the message of the next envelope.

    **Source**: https://connectrpc.com/docs/protocol/#streaming-rpcs
    """
    try:
        head = await stream.readexactly(5)
        if (size := int.from_bytes(head[1:], "big")) > _MAX_ENVELOPE_BYTES:
            raise SandboxLost(f"a sandbox sent an event of {size} bytes")
        return head[0], msgspec.json.decode(await stream.readexactly(size), type=dict[str, Any])
    except (asyncio.IncompleteReadError, msgspec.DecodeError) as error:
        raise SandboxLost("the output of a command was cut short") from error


class DaytonaBackend(_RemoteBackend):
    """Runs sandboxes of Daytona, whose names we choose."""

    def __init__(self, settings: DaytonaSettings, key: str, run: str) -> None:
        """Connect to nothing yet."""
        self._api = settings.api_url.rstrip("/")
        super().__init__("Daytona", {"Authorization": f"Bearer {key}"}, f"{self._api}/sandbox")
        self._settings = settings
        self._run = run
        self._toolboxes: dict[str, str] = {}
        """Where the agent inside a sandbox is reached."""

    async def start(self, name: str, image: str, ttl_s: float) -> None:
        """Implements `SandboxBackend.start`."""
        image = image or self._settings.image
        body = {
            "name": name,
            **({"snapshot": image} if image else {}),
            "labels": {"async-rl.run": self._run},
            "public": False,
            "networkBlockAll": not self._settings.network,
            "ttlMinutes": math.ceil(ttl_s / 60),
            "autoDeleteInterval": 0,  # when it stops
        }
        made = await self._calls.request_json("POST", f"{self._api}/sandbox", json=body)
        made = await self._wait_while(name, made, {"creating", "starting", "pulling_snapshot", "restoring"})
        if made["state"] != "started":
            why = made.get("errorReason") or "no reason was given"
            raise SandboxLost(f"sandbox {name} is {made['state']}: {why}")
        self._toolboxes[name] = f"{made['toolboxProxyUrl'].rstrip('/')}/{made['id']}"

    async def exec(
        self, name: str, command: str, *, timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        """Implements `SandboxBackend.exec`.

        The service merges both outputs and has no limit for them, so they go into files of which the first
        part is printed.
        """
        token = secrets.token_hex(16)
        source = "/dev/null"
        if stdin:
            source = f"/tmp/.{token}.in"
            await self.write_file(name, source, stdin)
        out, err = f"/tmp/.{token}.out", f"/tmp/.{token}.err"
        limited = shlex.join(limited_command(command, timeout_s, source))
        # In base64, because the answer is text.
        head = f"head -c {max_output_bytes + 1}"
        printed = f"{head} {out} | base64; echo {token}; {head} {err} | base64"
        script = f"{limited} >{out} 2>{err}; code=$?; {printed}; rm -f {out} {err}; exit $code"
        clock = asyncio.get_running_loop().time
        begin, output = clock(), Output(max_output_bytes)
        answer = await self._calls.request_json(
            "POST",
            f"{self._toolbox(name)}/process/execute",
            json={"command": shlex.join(["sh", "-c", script]), "timeout": math.ceil(timeout_s + GRACE_S)},
            limit_s=timeout_s + GRACE_S,
        )
        first, found, second = answer["result"].partition(token)
        if not found:
            raise SandboxLost(f"sandbox {name} answered a command with {answer['result'][:500]!r}")
        for descriptor, data in ((1, first), (2, second)):
            output.add(descriptor, base64.b64decode(data))
        exit_code = int(answer.get("exitCode") or 0)
        return output.result(exit_code, timed_out=ran_too_long(exit_code, clock() - begin, timeout_s))

    async def read_file(self, name: str, path: str) -> bytes:
        """Implements `SandboxBackend.read_file`."""
        where = f"{self._toolbox(name)}/files/download"
        status, body = await self._calls.request_file(where, path, may_be=(400, 404))
        if status != 200:
            await self._sandbox(name)
            raise FileNotFoundError(2, "no such file", path)
        return body

    async def write_file(self, name: str, path: str, data: bytes) -> None:
        """Implements `SandboxBackend.write_file`."""
        form = aiohttp.FormData()
        form.add_field("file", io.BytesIO(data), filename=os.path.basename(path))
        where = f"{self._toolbox(name)}/files/upload-v2"
        status, _ = await self._calls.request(
            "POST", where, params={"path": path}, data=form, may_be=(400, 404, 500)
        )
        if status != 200:
            await self._sandbox(name)
            raise OSError(f"{path} cannot be written")

    async def snapshot(self, name: str, snapshot: str) -> str:
        """Implements `SandboxBackend.snapshot`."""
        url = f"{self._api}/sandbox/{name}/snapshot"
        state = await self._calls.request_json("POST", url, json={"name": snapshot})
        await self._wait_while(name, state, {"snapshotting"})
        return snapshot

    async def end(self, name: str) -> None:
        """Implements `SandboxBackend.end`."""
        await self._calls.request("DELETE", f"{self._api}/sandbox/{name}", may_be=(404,))
        self._toolboxes.pop(name, None)

    async def end_snapshot(self, snapshot: str) -> None:
        """Implements `SandboxBackend.end_snapshot`."""
        where = f"{self._api}/snapshots/{snapshot}"
        status, body = await self._calls.request("GET", where, may_be=(404,))
        if status == 200:
            snapshot_id = msgspec.json.decode(body)["id"]
            await self._calls.request("DELETE", f"{self._api}/snapshots/{snapshot_id}", may_be=(404,))

    async def _wait_while(self, name: str, state: dict[str, Any], passing: set[str]) -> dict[str, Any]:
        """Return the description of a sandbox once its state is none of those that pass by themselves."""
        while state["state"] in passing:
            await asyncio.sleep(_LOOK_AGAIN_S)
            state = await self._sandbox(name)
        return state

    async def _sandbox(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = await self._calls.request_json("GET", f"{self._api}/sandbox/{name}")
        return answer

    def _toolbox(self, name: str) -> str:
        if (url := self._toolboxes.get(name)) is None:
            raise SandboxLost(f"sandbox {name} has ended")
        return url
