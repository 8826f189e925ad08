"""Compares a ledger with its tables."""

from __future__ import annotations

from async_rl.observability.records import TrajectoryCounts
from async_rl.store.ledger import Ledger


def audit_ledger(ledger: Ledger) -> TrajectoryCounts:
    """Return the counts of a ledger, which must be those of its tables."""
    ledger.flush()
    assert ledger.counts() == ledger._stored_counts()
    return ledger.counts()
