"""`async-rl check --memory` and `async-rl plan --gpu`: whether trainer ranks and engines fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from async_rl.config import Config, load_config
from async_rl.run.memory_estimate import DeviceUse, estimate_devices, nearest_change, parse_size
from async_rl.runtime.printable import print_text

_WIDTH: Final = 30
"""Characters of a bar."""


def show_memory(path: Path, overrides: Sequence[str], gpu: str | None) -> int:
    """Print what each rank and engine holds, whether it fits, and the nearest change that makes it fit.

    Args:
        path: The config's YAML file.
        overrides: `dotted.key=value` changes to it.
        gpu: Size of a GPU such as `80GB`; None prints no verdict.

    Returns:
        The exit code: 2 when something does not fit.

    Raises:
        ConfigError: The config, the model's config.json or the size cannot be used.
    """

    def load(changes: Sequence[str]) -> Config:
        return load_config(path, [*overrides, *changes], download_weights=False)

    size = None if gpu is None else parse_size(gpu)
    uses = estimate_devices(load([]), size)
    full = size or max(use.needs for use in uses)
    for use in uses:
        print_text(_line(use, full))
    if size is None:
        return 0
    failing = [use for use in uses if use.needs > size]
    if not failing:
        print_text(f"fits into {gpu} with {_gb(size - max(use.needs for use in uses))} to spare")
        return 0
    names = ", ".join(f"{use.name} by {_gb(use.needs - size)}" for use in failing)
    print_text(f"does not fit into {gpu}: {names}")
    changes = nearest_change(load, size)
    advice = "no single setting, layout or number of ranks" if changes is None else " ".join(changes)
    print_text(f"nearest change that fits: {advice}")
    return 2


def _line(use: DeviceUse, full: int) -> str:
    taken = sum(use.parts.values())
    filled = min(_WIDTH, round(_WIDTH * taken / full))
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in use.parts.items() if size)
    host = ", ".join(f"{name} {_gb(size)}" for name, size in use.host.items() if size)
    lines = [
        f"{use.name}: {'█' * filled}{'░' * (_WIDTH - filled)} {_gb(taken)}, {use.moment}",
        f"    {parts}",
    ]
    return "\n".join(lines + ([f"    in host memory: {host}"] if host else []))


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
