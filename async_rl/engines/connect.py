"""Clients of SGLang servers, as a config wants them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from async_rl.config import Config, SGLangEngines
from async_rl.engines.protocol import EngineFacts
from async_rl.engines.sglang import SGLangEngine


def external_keys() -> tuple[str | None, str | None]:
    """API key and admin key of servers that were not started by us: they are in the environment."""
    return os.environ.get("ASYNC_RL_ENGINE_API_KEY"), os.environ.get("ASYNC_RL_ENGINE_ADMIN_KEY")


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
