"""The event loop of the simulation."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

from async_rl.planning.virtual_time import VirtualTimeLoop


def test_a_closed_loop_holds_no_work_of_threads() -> None:
    loop, held = VirtualTimeLoop(thread_s=lambda: (1.0, 1.0)), Mock()
    holder = weakref.ref(held)
    loop.run_in_executor(None, held)
    loop.close()
    del held
    gc.collect()  # the loop is alive
    assert holder() is None
    assert loop.is_closed()
