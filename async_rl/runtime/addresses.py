"""Addresses of hosts."""

from __future__ import annotations


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from its own machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")
