"""Frames that are wrong in ways that a checksum does not find."""

from __future__ import annotations

from typing import Any

import numpy as np

from async_rl import codec
from async_rl.codec import Frame
from async_rl.errors import AlignmentError, CorruptFrame
from async_rl.routing import fit
from async_rl.types import Group, RoutingTrace, Trajectory
from tests.support.trajectories import make_group, make_trajectory

TRAJECTORY = make_trajectory("t", sampled=((4, 0), (3, 1)))
assert TRAJECTORY.trace is not None
VALID: tuple[Any, ...] = (TRAJECTORY.trace, TRAJECTORY, make_group("g"))
"""One object of each kind that is read from elsewhere."""


def split(obj: Any) -> tuple[bytes, bytes]:
    """Header and payload of an object's frame."""
    frame = Frame(obj)
    return frame._header, b"".join(frame.buffers())[frame._start :]


def seal(header: bytes, payload: bytes) -> bytes:
    """A frame of any header and payload whose checksums are right."""
    frame = Frame(None)
    frame._header, frame._payload_bytes = header, len(payload)
    frame._start = codec._align(codec._PREFIX_BYTES + len(header))
    return frame._head(codec._extend(0, np.frombuffer(payload, np.uint8))) + payload


def read(frame: bytes, kind: type[RoutingTrace | Trajectory | Group]) -> str:
    """Read a frame as its users do; says whether it passed, or which of the two documented errors it was."""
    try:
        found = codec.decode(frame, kind)
        if isinstance(found, RoutingTrace):
            fit(found, TRAJECTORY.token_ids)
    except (CorruptFrame, AlignmentError) as error:
        return type(error).__name__
    return "passed"
