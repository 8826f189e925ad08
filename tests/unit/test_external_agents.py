"""Agents on other hosts: the address and the TLS of the OpenAI endpoint."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from agent_loops.openai_agent import AgentAPI, OpenAIAgentLoop
from async_rl.errors import ConfigError
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.runtime import tls as tls_module
from async_rl.runtime.addresses import NODE_ADDRESS, reachable_address
from async_rl.runtime.tls import load_certificate
from tests.support.certificates import make_certificate
from tests.support.scripted_session import ScriptedSession
from tests.unit.test_listeners import few_descriptors, port_of, strangers

pytestmark = pytest.mark.real_time


async def agent(task: Any, api: Any) -> None: ...


HERE = "tests.unit.test_external_agents"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path, "localhost", "127.0.0.1")


@asynccontextmanager
async def served(files: tuple[Path, Path], **settings: Any) -> AsyncIterator[EndpointAccess]:
    endpoint = Endpoint(tls=load_certificate(*files), **settings)
    async with endpoint.open_trajectory(ScriptedSession("Hello."), reader=None) as access:
        yield access


async def answer(access: EndpointAccess, certificate: Path) -> str:
    async with aclosing(AgentAPI(access, str(certificate))) as api:
        said = await api.client.chat.completions.create(
            model=api.model, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in said])


async def test_an_agent_that_trusts_the_certificate_is_answered_over_tls(files: tuple[Path, Path]) -> None:
    async with served(files) as access:
        assert access.base_url.startswith("https://127.0.0.1:")
        assert access.session_url.startswith("https://")
        assert await answer(access, files[0]) == "Hello."
        async with aclosing(AgentAPI(access, str(files[0]))) as api:
            models = await asyncio.to_thread(lambda: list(api.sync_client.models.list()))
    assert [model.id for model in models] == ["policy"]


async def test_nothing_is_sent_when_the_client_does_not_trust_the_certificate_or_speaks_no_tls(
    files: tuple[Path, Path],
) -> None:
    async with served(files) as access:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"{access.base_url}/models")
            with pytest.raises(httpx.TransportError):
                await client.get(f"{access.base_url.replace('https:', 'http:')}/models")
        assert await answer(access, files[0]) == "Hello."


async def test_old_versions_of_tls_are_refused(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_on_debian(purpose: ssl.Purpose) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_on_debian)
    assert load_certificate(*files).minimum_version >= ssl.TLSVersion.TLSv1_2


async def test_a_connection_is_closed_when_its_handshake_takes_too_long(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.1)
    async with served(files) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(access.base_url))
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        monkeypatch.undo()  # a slow client has time again
        assert await answer(access, files[0]) == "Hello."


async def test_a_request_sent_with_the_end_of_the_handshake_is_answered(files: tuple[Path, Path]) -> None:
    """The client's last handshake message and its request arrive in one segment."""
    trusting = ssl.create_default_context(cafile=str(files[0]))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    async with served(files) as access:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(access.base_url))
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        client.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        client.write(f"Authorization: Bearer {access.api_key}\r\n\r\n".encode())
        writer.write(outgoing.read())
        answered = b""
        async with asyncio.timeout(60):
            while b"policy" not in answered:
                incoming.write(await reader.read(1 << 16))
                try:
                    answered += client.read(1 << 16)
                except ssl.SSLWantReadError:
                    continue
        writer.close()
    assert answered.startswith(b"HTTP/1.1 200")


@pytest.mark.real
@pytest.mark.parametrize(
    ("new_loop", "encrypted"),
    [(uvloop.new_event_loop, False), (uvloop.new_event_loop, True), (asyncio.new_event_loop, True)],
)
def test_an_agent_is_answered_while_strangers_hold_all_connections(
    new_loop: Callable[[], asyncio.AbstractEventLoop], encrypted: bool, files: tuple[Path, Path]
) -> None:
    """Ray's actors use uvloop, whose transports are not those of asyncio; strangers are closed there too."""

    async def ask() -> str:
        with few_descriptors(150):
            endpoint = Endpoint(tls=load_certificate(*files) if encrypted else None)
            opened = endpoint.open_trajectory(ScriptedSession("Hello."), reader=None)
            async with opened as access, strangers(port_of(access.base_url), 600):
                return await answer(access, files[0])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == "Hello."


# -- addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"host": "0.0.0.0"}, "10.1.2.3"),
        ({"host": "::"}, "10.1.2.3"),
        ({"public_host": "policy.example.org"}, "policy.example.org"),
        ({"public_host": "fd00::7"}, "fd00::7"),
    ],
)
async def test_agents_receive_the_nodes_address_or_the_public_host(
    settings: dict[str, str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_ADDRESS, "10.1.2.3")
    async with Endpoint(**settings).serving() as url:
        assert httpx.URL(url).host == host


async def test_the_endpoint_is_reached_at_its_address_alone_by_default_that_of_this_host() -> None:
    if (here := reachable_address()) == "127.0.0.1":
        pytest.skip("this machine has no other interface")
    for endpoint, own, other in ((Endpoint(), "127.0.0.1", here), (Endpoint(here), here, "127.0.0.1")):
        async with endpoint.serving() as url, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert httpx.URL(url).host == own
            assert (await client.get(f"{url}/v1/models")).status_code == 401
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(other, port_of(url))


# -- settings ---------------------------------------------------------------------------------------------


def open_loop(**settings: Any) -> OpenAIAgentLoop:
    return OpenAIAgentLoop(agent=f"{HERE}:agent", **settings)


def test_check_says_who_reaches_the_api_and_whether_it_is_encrypted(files: tuple[Path, Path]) -> None:
    def finding(**settings: Any) -> str:
        return " ".join(open_loop(**settings).check(""))

    keys = {"tls_certificate": str(files[0]), "tls_key": str(files[1])}
    assert "other hosts" not in finding()
    assert "over plain HTTP: prompts, answers and keys are readable" in finding(host="0.0.0.0")
    assert "key, over TLS" in finding(host="10.0.0.1", **keys)


def test_a_certificate_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "localhost")
    (other := tmp_path / "other").mkdir()
    _, other_key = make_certificate(other, "localhost")
    (third := tmp_path / "third").mkdir()
    locked = make_certificate(third, "localhost", password=b"secret")
    for (given, its_key), error in (
        ((certificate, None), "tls_certificate and tls_key belong together"),
        ((None, key), "tls_certificate and tls_key belong together"),
        ((tmp_path / "gone.pem", key), r"cannot read .*gone.pem: No such file"),
        ((key, certificate), "are not a certificate and its key"),
        ((certificate, other_key), "are not a certificate and its key"),
        (locked, "the key not encrypted"),
    ):
        with pytest.raises(ConfigError, match=error):
            open_loop(tls_certificate=given and str(given), tls_key=its_key and str(its_key))
