"""The direction of imports, held: see docs/architecture.md, "Modules and the direction of imports"."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    "types errors yaml12",
    "config routing staleness codec instruments waits processes supervision threads workers loading chat "
    "rewrites records engines.protocol training",
    "evaluation.records evaluation.estimates metrics endpoints discovery trackers report diagnosis watchdog "
    "engines queue weights sharing",
    "rollout openai_api",
    "recovery evaluation",
    "page doctor cluster",
    "driver",
    "orchestrator",
    "placement simulation",
    "reference metrics_page preflight evaluation.alone checkup plan inspection new_loop train sft run_report "
    "commands cli",
)
"""A module imports from its own layer and the ones before it."""

ONLY_IN = {
    "torch": (
        "trainer/",
        "async_rl/weights/broadcast.py",
        "async_rl/weights/buckets.py",
        "async_rl/weights/shared.py",
        "async_rl/engines/sglang_cpu.py",
        "async_rl/engines/sglang_narrow.py",
    ),
    "megatron": ("trainer/megatron/",),
    "mbridge": ("trainer/megatron/",),
    "ray": ("async_rl/placement/",),
    # Programs of their own, inside the server's process.
    "sglang": ("async_rl/engines/sglang_cpu.py", "async_rl/engines/sglang_narrow.py"),
    "create_task": ("async_rl/supervision.py",),
    "ensure_future": ("async_rl/supervision.py",),
}

FOR_AGENT_LOOPS = (
    "types",
    "errors",
    "loading",
    "threads",
    "workers",
    "supervision",
    "waits",
    "rollout.api",
    "openai_api",
)


def layer(module: str) -> int:
    """Of the most specific name that the module is, or is below of."""
    name = module.removeprefix("async_rl").removeprefix(".")
    ranks = {listed: rank for rank, names in enumerate(LAYERS) for listed in names.split()}
    while name and name not in ranks:
        name = name.rpartition(".")[0]
    return ranks.get(name, -1)


def used(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, and the task starters that it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("create_task", "ensure_future"):
                yield name


def violations(file: str, source: str) -> list[str]:
    package = file.split("/")[0]
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for_loops = tuple(f"async_rl.{name}" for name in FOR_AGENT_LOOPS)

    def forbidden(name: str) -> bool:
        top = name.split(".")[0]
        if top in ONLY_IN:
            return not file.startswith(ONLY_IN[top])
        if package == "async_rl":
            return top in ("agent_loops", "trainer") or (top == "async_rl" and layer(name) > layer(module))
        if package == "agent_loops":
            return top == "trainer" or (top == "async_rl" and not name.startswith(for_loops))
        return False

    return [f"{file} uses {name}" for name in used(ast.parse(source)) if forbidden(name)]


def sources() -> list[str]:
    folders = ("async_rl", "agent_loops", "trainer")
    return [str(p.relative_to(ROOT)) for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("file", sources())
def test_imports_point_down(file: str) -> None:
    assert violations(file, (ROOT / file).read_text()) == []


def test_every_module_has_a_layer() -> None:
    modules = (file.removesuffix(".py").removesuffix("/__init__") for file in sources())
    ours = [m.replace("/", ".") for m in modules if m.startswith("async_rl/")]
    assert [module for module in ours if layer(module) < 0] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("async_rl/config/root.py", "from async_rl.engines.pool import EnginePool"),
        ("async_rl/engines/pool.py", "def f():\n    import async_rl.rollout.session"),
        ("async_rl/orchestrator.py", "from async_rl import placement"),
        ("async_rl/codec.py", "from trainer.losses import ppo"),
        ("async_rl/queue/spool.py", "import torch.distributed as dist"),
        ("async_rl/orchestrator.py", "from ray.util import placement_group"),
        ("async_rl/engines/server.py", "import sglang"),
        ("async_rl/rollout/manager.py", "group.create_task(f())"),
        ("trainer/losses.py", "from megatron.core import parallel_state"),
        ("agent_loops/tool_loop.py", "from async_rl.engines.pool import EnginePool"),
        ("agent_loops/tool_loop.py", "from async_rl.rollout.session import RolloutSession"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1
