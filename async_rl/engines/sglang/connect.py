"""Clients of SGLang servers, as a config wants them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.errors import ConfigError


def external_keys(url: str) -> tuple[str | None, str | None]:
    """API key and admin key of a server that was not started by us: they are in the environment.

    Raises:
        ConfigError: When there is none and more than this machine can reach the server: whoever can might
            read what is asked, and change its weights.
    """
    keys = os.environ.get("ASYNC_RL_ENGINE_API_KEY"), os.environ.get("ASYNC_RL_ENGINE_ADMIN_KEY")
    if keys[0] is None and not is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"the server at {url} is open to other machines, and ASYNC_RL_ENGINE_API_KEY is not set: start "
            "it with --api-key and --admin-api-key, and set that and ASYNC_RL_ENGINE_ADMIN_KEY"
        )
    return keys


def check_shares_memory(engine: str, node: str, trainer_node: str, addresses: Mapping[str, str]) -> None:
    """Refuse an engine that cannot open the memory by which `weights.transport: tensor` sends weights.

    A server that is told of memory which is not there dies of it.

    Args:
        engine: Its name.
        node: The id of the node that it is on, or all that is known of it.
        trainer_node: The id of the node that trainer rank 0 is on.
        addresses: Of the cluster's nodes, by id.

    Raises:
        ConfigError: Unless they are one node.
    """
    if node == trainer_node:
        return
    engine_is_on, trainer_is_on = (
        f"{addresses[each]} (node {each[:8]})" if each in addresses else each for each in (node, trainer_node)
    )
    raise ConfigError(
        f"weights.transport is tensor, which needs engines on the node of trainer rank 0, {trainer_is_on}, "
        f"but {engine} is on {engine_is_on}: set weights.transport=distributed (or disk), or place both on "
        "one node"
    )


def node_of(url: str, driver_node: str, addresses: Mapping[str, str]) -> str:
    """The id of the node that a server is on, by its URL; the name in the URL when it is none of a node.

    Args:
        url: Of the server.
        driver_node: Where a loopback address leads to.
        addresses: Of the cluster's nodes, by id.

    Example:
        >>> node_of("http://localhost:30000", "d", {"d": "10.0.0.1", "e": "10.0.0.7"})
        'd'
        >>> node_of("http://10.0.0.7:30000", "d", {"d": "10.0.0.1", "e": "10.0.0.7"})
        'e'
    """
    host = urlsplit(url).hostname or ""
    if is_loopback(host) and host not in addresses.values():
        return driver_node
    return next((node for node, address in addresses.items() if address == host), host)


def is_loopback(host: str) -> bool:
    """Whether only its own machine reaches an address or name."""
    return host in ("localhost", "::1") or host.startswith("127.")


def sglang_client(
    config: Config,
    engine_id: str,
    url: str,
    facts: EngineFacts,
    keys: tuple[str | None, str | None],
    died: Callable[[], Awaitable[str | None]] | None,
) -> SGLangEngine:
    """A client; it connects to nothing yet.

    Args:
        config: Of the run, with SGLang engines.
        engine_id: Name in logs, metrics and segments.
        url: Of the server.
        facts: Of the model.
        keys: API key and admin key.
        died: Asked for the last words of a server that does not come up; None for one not started by us.
    """
    engine = config.engine
    assert isinstance(engine, SGLangEngines), "only SGLang servers have clients"
    api_key, admin_key = keys
    return SGLangEngine(
        engine_id,
        url,
        facts,
        api_key=api_key,
        admin_key=admin_key,
        routing=config.routing.from_engine,
        narrow_routing=engine.narrow_routing,
        start_timeout_s=engine.start_timeout_s,
        request_timeout_s=engine.request_timeout_s,
        died=died,
    )
