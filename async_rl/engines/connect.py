"""Clients of SGLang servers, as a config wants them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from async_rl.config import Config, SGLangEngines
from async_rl.engines.protocol import EngineFacts
from async_rl.engines.sglang import SGLangEngine
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


def check_same_host(config: Config, url: str) -> None:
    """Refuse a server that cannot open memory of this host when that is how weights are sent.

    Raises:
        ConfigError: With `weights.transport: tensor`, unless the URL is of this host.
    """
    if config.weights.transport == "tensor" and not is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"weights.transport is tensor, which needs engines on trainer rank 0's host, and {url} may be "
            "on another: set weights.transport to distributed or disk"
        )


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
