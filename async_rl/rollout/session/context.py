"""What sessions share: one frozen context for all sessions of a run or of an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.lease_dispatcher import LeaseDispatcher
from async_rl.observability.metrics import Metrics
from async_rl.runtime.serving_clock import ServingClock

_MAX_RECOVERING: Final = 16
"""Trajectories that recover their rows at a time. After a crash of the driver all that were complete need it,
and their prefills must not displace the generation of the others."""


@dataclass(frozen=True, kw_only=True)
class SessionContext:
    """The settings of sessions, and what they use in their process."""

    config: Config
    chat: ChatFormat
    facts: EngineFacts
    metrics: Metrics
    clock: Callable[[], float]
    """Monotonic seconds."""
    serving_clock: ServingClock
    """Measures the limits of agent loops, tools and trajectories."""
    calls: LeaseDispatcher
    """The policy's engines."""
    new_id: Callable[[], str]
    """Returns a unique id for each engine request."""
    models: Mapping[str, LeaseDispatcher] = field(default_factory=dict)
    """The engines of further models, teachers and judges, by the model's name."""
    recoveries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_RECOVERING))
    """Held while a trajectory recovers its routing rows."""
