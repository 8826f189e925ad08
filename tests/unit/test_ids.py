"""Ids are unique, of one width, and grow with time."""

from __future__ import annotations

import re

from async_rl.runtime.ids import new_id


def test_ids_are_distinct_of_one_width_and_grow_with_time() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
