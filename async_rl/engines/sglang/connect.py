"""Creates clients of SGLang servers from the config, and checks that the servers can be reached."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server_checks import ServerNeeds, ServerState
from async_rl.errors import ConfigError
from async_rl.runtime.addresses import is_loopback


def external_keys(url: str) -> tuple[str | None, str | None]:
    """Return API key and admin key of a server that was not started by us, from the environment.

    Raises:
        ConfigError: When there is no key and other machines can reach the server: they could read its calls
            and change its weights.
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

    A server dies when it has to open memory that does not exist on its node.

    Args:
        engine: The engine's name.
        node: The id of the engine's node, or its host name if the id is unknown.
        trainer_node: The id of the node of trainer rank 0.
        addresses: The addresses of the cluster's nodes, by id.

    Raises:
        ConfigError: Unless both nodes are the same.
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
    """Return the id of a server's node, or the host name in its URL if that is no node of the cluster.

    Args:
        url: URL of the server.
        driver_node: The node that a loopback address refers to.
        addresses: The addresses of the cluster's nodes, by id.

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


def sglang_client(
    config: Config,
    engine_id: str,
    url: str,
    facts: EngineFacts,
    keys: tuple[str | None, str | None],
    state: Callable[[], Awaitable[ServerState]] | None,
) -> SGLangEngine:
    """Return a client, which connects with its first request.

    Args:
        config: Config of the run, with SGLang engines.
        engine_id: Name in logs, metrics and segments.
        url: URL of the server.
        facts: Dimensions of the model.
        keys: API key and admin key.
        state: Returns the state of the server's processes; None for one not started by us.
    """
    engine = config.engine
    assert isinstance(engine, SGLangEngines), "only SGLang servers have clients"
    api_key, admin_key = keys
    return SGLangEngine(
        engine_id,
        url,
        facts,
        engine,
        ServerNeeds.of(config),
        api_key=api_key,
        admin_key=admin_key,
        state=state,
    )
