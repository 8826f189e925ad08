"""Ranks of the trainer in processes of their own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Return what `function(rank, *arguments)` returns in as many forks of a process that has the trainer.

    Only the first call in a test process waits for the trainer's imports, which take longer than most ranks.
    """
    multiprocessing.set_forkserver_preload(["tests.support.trainers", "tests.support.tiny_model"])
    with tempfile.TemporaryDirectory() as folder:
        processes = (function, arguments, folder)
        mp.start_processes(_run, processes, nprocs=ranks, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def _run(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, *arguments), f"{folder}/{rank}")
