"""Patches SGLang so that aborted requests which ask for it end without their routing rows.

A request that an update aborts is sent again, and its rows are computed anew: they would be moved for
nothing. Like the launchers that install it, this runs in the server's processes only.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker.)

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
from typing import Any, Final

SUPPORTED: Final = "0.5.23"
"""The version of SGLang that is patched."""

OMIT_ABORTED_ROWS: Final = "async_rl_omit_aborted_rows"
"""Name in a request's `custom_params` that asks for no rows if the request is aborted."""

_SOURCE: Final = "ac5949bd41fa318dd136810d1e4756f556cbd12463543dff7588c0945513bbe1"
"""sha256 of the sources of the class and the functions that are patched or relied upon."""


def omit_aborted_rows() -> bool:
    """Let requests that ask for it end without rows when they are aborted.

    Returns:
        False when the installed SGLang is not the one that the patch was written for, and is left as it is.
        Clients then leave the connection where the rows begin.
    """
    if importlib.metadata.version("sglang") != SUPPORTED:
        return False
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components import batch_result_processor

    request = schedule_batch.Req
    processor = batch_result_processor.SchedulerBatchResultProcessor
    collect_rows, update_finish = processor._maybe_collect_routed_experts, request.update_finish_state
    if hash_source(schedule_batch.FINISH_ABORT, update_finish, collect_rows) != _SOURCE:
        return False

    def omits_rows(req: Any, reason: Any) -> bool:
        """Whether a request that ends for this reason asks for no rows; an error has a status code."""
        if not isinstance(reason, schedule_batch.FINISH_ABORT) or reason.status_code is not None:
            return False
        return bool((req.sampling_params.custom_params or {}).get(OMIT_ABORTED_ROWS))

    def update_finish_state(self: Any, *arguments: Any, **named: Any) -> None:
        abort = self.to_finish
        if abort is None or not omits_rows(self, abort):
            update_finish(self, *arguments, **named)
            return
        # A request that ends by itself in the step in which it is aborted keeps its reason, and so its rows.
        self.to_finish = None
        update_finish(self, *arguments, **named)
        if not self.finished():
            self.finished_reason = abort

    def collect_unless_aborted(self: Any, req: Any) -> None:
        if not omits_rows(req, req.finished_reason):
            collect_rows(self, req)

    request.update_finish_state = update_finish_state
    processor._maybe_collect_routed_experts = collect_unless_aborted
    return True


def hash_source(*parts: Any) -> str:
    """Return the sha256 of the sources of classes and functions."""
    return hashlib.sha256("".join(inspect.getsource(part) for part in parts).encode()).hexdigest()
