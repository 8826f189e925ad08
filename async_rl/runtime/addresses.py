"""Addresses of hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Final

NODE_ADDRESS: Final = "ASYNC_RL_NODE_ADDRESS"
"""Environment variable with this host's address in the Ray cluster; each process of a run sets it."""


def reachable_address() -> str:
    """Return the address under which other hosts reach this one.

    In a Ray cluster this is the node's address; otherwise that of the interface that leads out, or loopback
    if there is none.
    """
    node = os.environ.get(NODE_ADDRESS, "127.0.0.1")
    if node != "127.0.0.1":  # what Ray calls a machine without others
        return node
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: any address elsewhere. UDP sends nothing to connect.
        except OSError:
            return node
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from its own machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
