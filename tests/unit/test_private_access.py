"""No code reads or patches a private attribute of another class, except what `ALLOWED` lists with reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("async_rl", "trainer", "agent_loops", "benchmarks", "tests", "monitoring", "verification")

STANDARD = {"_replace", "_asdict", "_fields", "_make"}
"""Public by the documentation of the standard library (named tuples)."""
STANDARD_FUNCTIONS = {"os._exit", "sys._current_frames"}

ALLOWED: dict[str, dict[str, str]] = {
    "async_rl/engines/sglang/aborted_rows.py": {
        "_maybe_collect_routed_experts": "SGLang has no hook there; the launcher leaves out aborted requests",
    },
    "async_rl/engines/sglang/cpu_launcher.py": {
        "_launch_fused_gate_sigmoid_mul": "SGLang has no hook there; the launcher replaces it on a CPU",
        "_create_c10d_store": "torch has no public API for it",
        "_freeze_gc_after_server_warmup": "SGLang has no option for it; it fails without a warm-up",
    },
    "async_rl/engines/sglang/narrow_launcher.py": {
        "_get_local_slice": "SGLang has no hook there; the launcher narrows what it captures",
    },
    "async_rl/observability/metrics.py": {
        "_value": "prometheus_client has no public API for it",
        "_sum": "prometheus_client has no public API for it",
        "_buckets": "prometheus_client has no public API for it",
        "_upper_bounds": "prometheus_client has no public API for it",
    },
    "async_rl/queue/journal.py": {
        "_epoch": "an entry keeps its history over its replacement",
    },
    "async_rl/rollout/workers/metric_counts.py": {
        "_sum": "prometheus_client has no public API for it",
        "_buckets": "prometheus_client has no public API for it",
        "_labelnames": "prometheus_client has no public API for it",
        "_metrics": "prometheus_client has no public API for it",
        "_value": "prometheus_client has no public API for it",
    },
    "verification/simulation/growth.py": {
        "_debugmallocstats": "CPython has no public account of the bytes of its small objects",
    },
    "async_rl/weights/broadcast.py": {
        "_new_process_group_helper": "torch has no public API for it",
        "_world": "torch has no public API for it",
    },
    "tests/contract/test_adapters_sglang.py": {
        "_http": "asks the server what it has loaded",
    },
    "tests/contract/test_engine_contract.py": {
        "_FLUSH_LIMIT_S": "shortens a wait",
    },
    "tests/integration/test_trainer_parity.py": {
        "_BRIDGES": "the test covers exactly the architectures of this table",
    },
    "tests/integration/test_trainer_routers.py": {
        "_get_transformer_layer_spec": "mbridge has no public API for it",
        "_get_gptmodel_args": "mbridge has no public API for it",
    },
    "tests/integration/test_trainer_spec.py": {
        "_get_transformer_layer_spec": "mbridge has no public API for it",
        "_weight_name_mapping_mcore_to_hf": "mbridge has no public API for it",
    },
    "tests/property/test_delta_properties.py": {
        "_ELEMENTS": "makes blocks small enough for small cases",
    },
    "tests/property/test_journal_properties.py": {
        "_ENTRIES_PER_TURN": "makes turns small enough for small cases",
        "_begin_pass": "takes a step of a compaction in the test's own order",
        "_unvisited": "takes a step of a compaction in the test's own order",
        "_visit_entries": "takes a step of a compaction in the test's own order",
        "_pieces": "the model of the journal reuses its splitting of calls",
        "_turns": "the model of the journal reuses its count of turns",
    },
    "tests/simulation/test_engines_under_fire.py": {
        "_update_s": "sets the speed of a simulated engine",
        "_running": "the calls of a simulated engine",
        "_version": "the version that a simulated engine serves",
    },
    "tests/simulation/test_found.py": {
        "_config": "changes one setting of a running manager",
        "_run_attempt": "runs one attempt without its group",
        "_run_siblings": "runs one group without the manager's loop",
    },
    "tests/simulation/test_recovery.py": {
        "_thread_name_prefix": "an executor has no public name",
        "_calls": "the calls that a crash cuts off",
    },
    "tests/simulation/test_stalls.py": {
        "_settle_group": "injects a fault between two steps of the manager",
    },
    "tests/simulation/test_sweep.py": {
        "_TaskGroup": "compares with the standard library's task group",
    },
    "tests/support/frames.py": {
        "_header": "damages a frame and repairs its checksums",
        "_start": "damages a frame and repairs its checksums",
        "_payload_bytes": "damages a frame and repairs its checksums",
        "_align": "damages a frame and repairs its checksums",
        "_PREFIX_BYTES": "damages a frame and repairs its checksums",
        "_head": "damages a frame and repairs its checksums",
        "_checksum": "damages a frame and repairs its checksums",
    },
    "tests/support/local_cluster.py": {
        "_config": "starts another engine like the first",
        "_policy": "starts another engine like the first",
    },
    "tests/unit/test_adapters.py": {
        "_adapters": "what a client was given, before there is a server",
    },
    "tests/unit/test_codec.py": {
        "_header": "damages a frame and repairs its checksums",
    },
    "tests/unit/test_journal.py": {
        "_COMPACT_BYTES": "makes a small file large enough to compact",
        "_begin_pass": "takes a step of a compaction in the test's own order",
        "_visit_entries": "takes a step of a compaction in the test's own order",
        "_append": "takes a step of the journal's thread in the test's own order",
    },
    "tests/unit/test_ledger.py": {
        "_changes": "damages the database under the ledger",
        "_tables": "damages the database under the ledger",
        "_database": "damages the database under the ledger",
    },
    "tests/unit/test_membership.py": {
        "_connect": "gives members engines that refuse a connection",
    },
    "tests/unit/test_routing.py": {
        "_BLOCK": "makes blocks small enough for small cases",
    },
    "tests/unit/test_rollout_workers.py": {
        "_COMPACT_BYTES": "makes a small file large enough to compact",
        "_GROWTH": "lets every write compact",
    },
    "tests/unit/test_tool_loop.py": {
        "_RELEASE_S": "shortens a wait",
        "_meeting": "the test module's own variable",
    },
    "trainer/megatron/bridge.py": {
        "_model_provider": "mbridge has no public API for it",
        "_weight_name_mapping_mcore_to_hf": "mbridge has no public API for it",
    },
    "trainer/megatron/cpu.py": {
        "_megatron_prepared": "marks torch as prepared, once in a process",
        "_getframe": "the standard library documents it",
        "_set_cuda_rng_state": "megatron-core has no public API for it",
        "_gather_along_first_dim": "megatron-core has no public API for it",
        "_reduce_scatter_along_first_dim": "megatron-core has no public API for it",
    },
    "trainer/megatron/model.py": {
        "_apply_expert_bias": "megatron-core has no public API for it",
    },
    "trainer/megatron/shards.py": {
        "_get_model_param_range_map": "megatron-core has no public API for it",
    },
}
"""Files with the private attributes that they still read or patch, each with its reason."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(node: ast.ClassDef) -> set[str]:
    """Returns the attributes that a class body or one of its methods assigns to itself."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id in ("self", "cls")
        ):
            found.add(each.attr)
    return found


def names_in_class(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Returns what a class and its bases in the same file define."""
    found = defined_names(node)
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if name in classes and classes[name] is not node:
            found |= names_in_class(classes[name], classes)
    return found


def private_access(source: str) -> Iterator[tuple[str, int]]:
    """Yields the private attributes of other classes that a module reads, sets or patches, and the lines."""
    tree = ast.parse(source)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def search(node: ast.AST, own: set[str]) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.ClassDef):
            own = own | names_in_class(node, classes)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            receiver = ast.unparse(node.value)
            if (
                receiver not in ("self", "cls", "super()")
                and node.attr not in STANDARD | own
                and f"{receiver}.{node.attr}" not in STANDARD_FUNCTIONS
            ):
                yield node.attr, node.lineno
        if isinstance(node, ast.Call):
            yield from patched_names(node)
        for child in ast.iter_child_nodes(node):
            yield from search(child, own)

    yield from search(tree, set())


def patched_names(call: ast.Call) -> Iterator[tuple[str, int]]:
    """Yields private names that `getattr`, `setattr` and `monkeypatch` take as strings."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("getattr", "setattr", "delattr", "object", "patch"):
        return
    for argument in call.args[:2]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            name = argument.value.rpartition(".")[2]
            if is_private(name) and name.isidentifier() and ast.unparse(call.args[0]) != "self":
                yield name, call.lineno


def access_by_file() -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for name, line in private_access(path.read_text()):
                found.setdefault(file, {}).setdefault(name, []).append(line)
    return found


def test_private_attributes_are_used_by_their_class_only() -> None:
    found = access_by_file()
    new = [
        f"{file}:{line} uses {name}"
        for file, names in found.items()
        for name, lines in names.items()
        for line in lines
        if name not in ALLOWED.get(file, {})
    ]
    assert new == [], "offer a public property, a parameter or a hook instead"


def test_every_exception_is_still_needed() -> None:
    found = access_by_file()
    stale = [
        f"{file}: {name}"
        for file, names in ALLOWED.items()
        for name in names
        if name not in found.get(file, {})
    ]
    assert stale == [], "delete these entries of ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "def f(queue):\n    return queue._ledger",
        "pool._slots.clear()",
        "class A:\n    def f(self, other):\n        return other._size",
        "monkeypatch.setattr(pool, '_slots', {})",
        "monkeypatch.setattr('async_rl.queue.spool._write', None)",
        "getattr(pool, '_slots')",
    ],
)
def test_private_access_is_found(source: str) -> None:
    assert len(list(private_access(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        return self._size",
        "class A:\n    _size = 0\n    def f(self, other):\n        return other._size",
        "class A:\n    _size = 0\nclass B(A):\n    def f(self, other):\n        return other._size",
        "os._exit(1)",
        "pair._replace(a=1)",
    ],
)
def test_own_attributes_are_not_private_access(source: str) -> None:
    assert list(private_access(source)) == []
