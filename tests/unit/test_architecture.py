"""The direction of imports: see docs/design/architecture.md."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    "types errors",
    "routing codec staleness engine_protocol",
    "trainer_protocol",
    "runtime",
    "config",
    "observability",
    "observability.page observability.trackers",
    "data engines store",
    "engines.sglang weights rollout.session rollout.rewards",
    "rollout openai_api",
    "rollout.workers",
    "evaluation",
    "run",
    "placement planning",
    "sft",
    "cli",
)
"""A package imports itself and packages of earlier lines, so there can be no cycle between packages."""

ONLY_IN = {
    "torch": (
        "trainer/",
        "async_rl/engines/group_liveness.py",
        "async_rl/weights/broadcast.py",
        "async_rl/weights/buckets.py",
        "async_rl/weights/shared_memory.py",
        "async_rl/engines/sglang/abortable_groups.py",
        "async_rl/engines/sglang/cpu_launcher.py",
        "async_rl/engines/sglang/narrow_launcher.py",
    ),
    "megatron": ("trainer/megatron/",),
    "mbridge": ("trainer/megatron/",),
    "ray": ("async_rl/placement/",),
    # Programs of their own, inside the server's process.
    "sglang": (
        "async_rl/engines/sglang/abortable_groups.py",
        "async_rl/engines/sglang/aborted_rows.py",
        "async_rl/engines/sglang/cpu_launcher.py",
        "async_rl/engines/sglang/hidden_keys.py",
        "async_rl/engines/sglang/memory_gate.py",
        "async_rl/engines/sglang/narrow_launcher.py",
    ),
    "create_task": (
        "async_rl/runtime/supervision.py",
        "agent_loops/environment/verifiers_child.py",  # a program of its own, without our packages
    ),
    "ensure_future": ("async_rl/runtime/supervision.py",),
}

OUTSIDE_OF_THE_WHEEL = ("verification", "tests", "benchmarks")

FOR_AGENT_LOOPS = ("types", "errors", "runtime", "rollout.session.api", "openai_api")


def package(module: str) -> str:
    """The name in `LAYERS` that a dotted name belongs to; empty if there is none."""
    name = module.removeprefix("async_rl").removeprefix(".")
    listed = {listed for names in LAYERS for listed in names.split()}
    while name and name not in listed:
        name = name.rpartition(".")[0]
    return name


def may_import(module: str, imported: str) -> bool:
    """Whether one module of `async_rl` may import another."""
    rank = {listed: rank for rank, names in enumerate(LAYERS) for listed in names.split()}
    source, target = package(module), package(imported)
    return not target or source == target or rank[target] < rank[source]


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


@cache
def uses_of(file: str) -> tuple[str, ...]:
    """What a module of the product uses."""
    return tuple(used(ast.parse((ROOT / file).read_text())))


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def violations(file: str, uses: Iterable[str]) -> list[str]:
    package = file.split("/")[0]
    module = module_of(file)
    for_loops = tuple(f"async_rl.{name}" for name in FOR_AGENT_LOOPS)

    def forbidden(name: str) -> bool:
        top = name.split(".")[0]
        if top in OUTSIDE_OF_THE_WHEEL:
            return True
        if top in ONLY_IN:
            return not file.startswith(ONLY_IN[top])
        if package == "async_rl":
            return top in ("agent_loops", "trainer") or (top == "async_rl" and not may_import(module, name))
        if package == "agent_loops":
            return top == "trainer" or (top == "async_rl" and not name.startswith(for_loops))
        return False

    return [f"{file} uses {name}" for name in uses if forbidden(name)]


def sources() -> list[str]:
    folders = ("async_rl", "agent_loops", "trainer")
    return [str(p.relative_to(ROOT)) for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def test_every_package_has_a_layer() -> None:
    packages = {".".join(path.relative_to(ROOT).parts[:-1]) for path in (ROOT / "async_rl").rglob("*.py")}
    assert {name for name in packages - {"async_rl"} if not package(name)} == set()


def test_imports_point_down() -> None:
    assert [found for file in sources() for found in violations(file, uses_of(file))] == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    known = {module_of(file): file for file in sources()}

    def nearest(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {
        module: {nearest(name) for name in uses_of(file)} - {"", module} for module, file in known.items()
    }
    assert tuple(TopologicalSorter(graph).static_order())


def test_class_names_are_unique() -> None:
    defined = defaultdict(list)
    for file in sources():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(f"{file}:{node.lineno}")
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("async_rl/config/root.py", "from async_rl.engines.pool import EnginePool"),
        ("async_rl/engines/pool.py", "def f():\n    import async_rl.rollout.session.rollout_session"),
        ("async_rl/codec.py", "from trainer.losses import ppo"),
        ("trainer/worker.py", "from verification.simulation import faults"),
        ("async_rl/store/spool.py", "import torch.distributed as dist"),
        ("async_rl/rollout/manager.py", "group.create_task(f())"),
        ("agent_loops/tool_loop.py", "from async_rl.rollout.session.rollout_session import RolloutSession"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, source: str) -> None:
    assert len(violations(file, used(ast.parse(source)))) == 1
