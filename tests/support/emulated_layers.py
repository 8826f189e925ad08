"""Processes in which TransformerEngine's layers are emulated. Imports nothing that prepares Megatron-Core."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

EMULATED = Path(__file__).parent / "emulated_te"
"""The folder of the emulated package."""


def spawn_with_transformer_engine(function: Callable[..., None], *arguments: Any, ranks: int = 1) -> None:
    """Run `function(rank, *arguments)` in processes where Megatron-Core imports the emulated layers."""
    sys.path.insert(0, str(EMULATED))  # which processes inherit
    try:
        mp.spawn(_run, (function.__module__, function.__name__, arguments), nprocs=ranks)
    finally:
        sys.path.remove(str(EMULATED))


def _run(rank: int, module: str, name: str, arguments: tuple[Any, ...]) -> None:
    importlib.import_module("transformer_engine")  # before the trainer is, which hides it without a GPU
    getattr(importlib.import_module(module), name)(rank, *arguments)
