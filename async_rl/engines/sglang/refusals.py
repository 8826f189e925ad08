"""What a failed HTTP request to a server means: who is to blame, and what the caller should do.

| reply | meaning | error |
|---|---|---|
| 400, 413, 422 with an explanation as SGLang writes it | any engine would refuse it | `RequestRefused` |
| 429, or 503 with Retry-After | the engine asks for fewer calls | `EngineBusy` |
| any other (401, 404, 500, a proxy's page) | the engine is at fault | `CallLost`, a strike |
| none: this process has no descriptor, port or memory for a connection | we are at fault | `LocalShortage` |
| none: the connection is refused | the engine is gone | `EngineUnreachable` |
| none: the connection breaks | the call is lost | `ConnectionLost`, a strike |

Pure: no I/O, no clock.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp
import msgspec

from async_rl.errors import (
    CallLost,
    ConnectionLost,
    EngineBusy,
    EngineError,
    EngineUnreachable,
    LocalShortage,
    RequestRefused,
)
from async_rl.runtime.untrusted_json import UNREADABLE

_BLAMES_REQUEST: Final = frozenset({400, 413, 422})

_LOCAL_ERRNOS: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.EADDRNOTAVAIL}
)
"""Raised by this process or its machine before anything reaches the engine."""

_LOCAL_RESOLVER_ERRORS: Final = frozenset({socket.EAI_AGAIN, socket.EAI_SYSTEM, socket.EAI_MEMORY})
"""The resolver of this machine did not work; a name that does not exist (EAI_NONAME) is not among them."""


def explain_refusal(
    engine_id: str, status: int, retry_after: str | None, body: bytes, now: datetime
) -> EngineBusy | CallLost | RequestRefused:
    """Return the error for a reply to /generate that is not 200.

    Args:
        engine_id: Name of the engine in the error.
        status: The reply's status.
        retry_after: Its Retry-After header, seconds or a date.
        body: Its content.
        now: The time of day, for a Retry-After that is a date.
    """
    message = f"{engine_id} answered {status} to a request: {body[:500]!r}"
    if is_back_pressure(status, retry_after):
        return EngineBusy(message, parse_retry_after(retry_after, now))
    if status in _BLAMES_REQUEST and _has_sglang_shape(body):
        return RequestRefused(message)
    return CallLost(message)


def is_back_pressure(status: int, retry_after: str | None) -> bool:
    """Whether a reply asks for fewer requests."""
    return status == 429 or (status == 503 and retry_after is not None)


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Return the seconds of a Retry-After header; None without a usable one, as one that says "at once".

    Example:
        >>> from datetime import UTC
        >>> now = datetime(2026, 1, 1, tzinfo=UTC)
        >>> parse_retry_after("7", now), parse_retry_after("Thu, 01 Jan 2026 00:00:30 GMT", now)
        (7.0, 30.0)
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        seconds = float(value)
    else:
        try:
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError):  # no date, or one without a time zone
            return None
    return seconds if seconds > 0 else None


def explain_lost_connection(engine_id: str, url: object, error: aiohttp.ClientError) -> EngineError:
    """Return the error for a request that got no reply."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and _is_local(cause):
        return LocalShortage(
            f"this process cannot connect to {engine_id} at {url}: {cause.strerror or cause} (file "
            f"descriptors in use: {_count_descriptors()}); raise the limit of open files (ulimit -n), or "
            f"lower rollout.max_concurrent_trajectories"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        return EngineUnreachable(f"{engine_id} at {url} cannot be reached: {error}")
    return ConnectionLost(f"{engine_id} at {url}: connection lost: {error!r}")


def _is_local(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno in _LOCAL_RESOLVER_ERRORS
    return error.errno in _LOCAL_ERRNOS


def _count_descriptors() -> int | str:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no descriptor to list them with
        return "all"


def _has_sglang_shape(body: bytes) -> bool:
    """Whether a body is an error as SGLang writes it; a proxy's page or another program's JSON is not.

    SGLang 0.5.23 answers `{"object": "error", "message": ..., "code": 400}` or `{"error": <reason>}`,
    older versions FastAPI's `{"detail": [...]}`.
    """
    try:
        reply: Any = msgspec.json.decode(body)
    except UNREADABLE:
        return False
    if not isinstance(reply, dict):
        return False
    if reply.get("object") == "error":
        return bool(reply.get("message"))
    return bool(reply.get("error") or reply.get("detail"))
