"""Serves a live page with known figures, as a run serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from async_rl.config import Config, parse_config
from async_rl.observability.diagnosis import EngineView
from async_rl.observability.endpoints import serve
from async_rl.observability.failures import FailureExample, FailureRow
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.feed import Feed
from async_rl.observability.page.routes import page_routes
from async_rl.observability.page.tiles import stages
from async_rl.observability.page.view import Now, SlowTrajectory
from async_rl.observability.records import StepRecord
from async_rl.runtime.supervision import services
from async_rl.runtime.waits import Waits, acting
from tests.support.finished_run import HOSTILE, MAX_STALENESS


def config(name: str = "calculator-moe") -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "run": {"name": name, "max_steps": 200},
            "rollout": {"max_staleness": MAX_STALENESS},
        }
    )


def now(step: int = 120, state: str = "moving", **changed: object) -> Now:
    """Return the state of a run at one moment; its names contain markup."""
    engines = [
        EngineView(engine_id=f"engine-{i}", state="serving", weight_version=step, calls=24 - 3 * i,
                  prefill_tokens=0 if i else 4096, error="")
        for i in range(5)
    ]  # fmt: skip
    engines[2] = msgspec.structs.replace(
        engines[2],
        state="quarantined",
        weight_version=step - 2,
        calls=0,
        error=f"no chunk for 60 s {HOSTILE}",
    )
    engines[3] = msgspec.structs.replace(engines[3], state="updating", weight_version=step - 1)
    waits = ("a chunk of engine-0", "tool search", "a chunk of engine-1", HOSTILE, "a free slot")
    slowest = [
        SlowTrajectory(
            trajectory_id=f"0190c2f4a{i}6b7e31b5f0000000000000",
            shown_id=f"0190c2f4a{i}",
            task_id=HOSTILE if i == 3 else f"calculator-{411 + 7 * i}",
            age_s=412.5 - 37 * i,
            turn=6 - i,
            tokens=3712 - 401 * i,
            engine=wait.rpartition(" ")[2] if "chunk" in wait else "",
            waits_for=wait,
            waits_s=0.1 + 7 * i,
        )
        for i, wait in enumerate(waits)
    ]
    lost = FailureExample(trajectory_id="0190c2f4a06b7e31", attempt=2, error=f"no container left {HOSTILE}")
    lost_sandboxes = FailureRow(
        kind="sandbox_lost", label="sandbox lost", number=1204, share="12%", examples=(lost,) * 3
    )
    shown = Now(
        phase="training",
        state=state,
        step=step,
        max_steps=200,
        elapsed_s=4211.0,
        remaining_s=2790.0,
        stages=stages(trained=6514, dropped={"stale": 20, HOSTILE: 13}, queued=41, in_flight=96),
        engines=engines,
        engines_more=0,
        engines_by_state={"serving": 3, "updating": 1, "quarantined": 1},
        slowest=slowest,
        report="train loop waits for a batch (0.4 s): 5 of 8 groups are ready, 12 in flight\n"
        "  <- group 0190c2f4: waits for its trajectories (38 s)\n"
        "  <- trajectory 0190c2f4a86b waits for tool search (7.1 s, limit 60 s)",
        failures=[lost_sandboxes],
    )
    return msgspec.structs.replace(shown, **changed)


@asynccontextmanager
async def watched(
    read_status: Callable[[], Now],
    records: Callable[[], Sequence[StepRecord]],
    host: str = "127.0.0.1",
    refresh_s: float = 0.01,
) -> AsyncIterator[tuple[str, Feed]]:
    """Serve a page; yields its URL and its feed."""
    feed = Feed(config(), read_status, records, refresh_s=refresh_s, max_draw_share=1e9)
    with acting("run", waits=Waits()):
        async with (
            serve(Metrics(), host, 0, lambda: {"status": "ok"}, page_routes(feed)) as url,
            services(page=feed.run),
        ):
            yield url, feed
