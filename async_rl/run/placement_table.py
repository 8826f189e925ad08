"""Which ranks and engines share a node, on nodes with a number of GPUs: what `async-rl check` shows.

Ray decides where the processes of a run start. This shows what it chooses on empty, equal nodes, as few as
are needed: ranks first, in units that stay together, then engines on what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from async_rl.config import Config, LayoutConfig, SGLangEngines
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.formatting import number_ranges
from async_rl.runtime.devices import count_gpus


class _Node:
    """A node with free GPUs, and the numbers of what runs there."""

    def __init__(self, gpus: float) -> None:
        self.free = gpus
        self.ranks: list[int] = []
        self.engines: dict[str, list[int]] = {}

    def take(self, gpus: float) -> None:
        self.free = round(self.free - gpus, 4)


class EngineGroup(NamedTuple):
    """Engines of one model."""

    name: str
    number: int
    """How many there are."""
    num_nodes: int
    gpus: float
    """GPUs of one engine on each of its nodes."""


def ranks_together(layout: LayoutConfig) -> int:
    """Return how many consecutive ranks exchange the most data: those of a tensor or an expert group."""
    return max(layout.tp * layout.cp, layout.ep * layout.etp)


def processes_per_node(
    asked: Mapping[str, float],
    count: int,
    together: int,
    free: Sequence[Mapping[str, float]],
    total: Sequence[Mapping[str, float]],
) -> int:
    """Return how many consecutive processes are placed on a node at once.

    Args:
        asked: The resources of one process.
        count: Number of all processes.
        together: Number that should share a node; it divides `count`.
        free: What is free now on each node.
        total: What each node has.

    Returns:
        The largest divisor of `together` for which all processes fit into what is free. Where even single
        ones do not fit, they wait: the largest for which they fit into all that the nodes have, or that fits
        on any.

    Example:
        >>> processes_per_node({"GPU": 1}, 16, 8, [{"GPU": 8}] * 2, [{"GPU": 8}] * 2)
        8
    """

    def fitting(nodes: Sequence[Mapping[str, float]], number: int) -> int:
        return sum(
            int(min(node.get(name, 0) / (amount * number) for name, amount in asked.items()) + 1e-9)
            for node in nodes
        )

    divisors = [number for number in range(together, 0, -1) if together % number == 0]
    for nodes in (free, total):
        for number in divisors:
            if fitting(nodes, number) * number >= count:
                return number
    return next((number for number in divisors if fitting(total, number)), 1)


def engine_groups(config: Config) -> list[EngineGroup]:
    """Return the engines that a config starts on GPUs, of the policy and of `models`."""
    found = []
    for name, job in [("engine", config), *((name, config.of_model(name)) for name in config.models)]:
        engine = job.engine
        if isinstance(engine, SGLangEngines) and not engine.urls and engine.urls_file is None:
            gpus = job.placement.resources_per_engine.get("GPU", engine.tp_size / engine.num_nodes)
            found.append(EngineGroup(name, engine.num_engines, engine.num_nodes, gpus))
    return found


def check_shared_gpus(config: Config) -> None:
    """Check that each rank of a config whose processes use GPUs has one of an engine to share, if it does.

    Raises:
        EnvironmentNotReady: There are more ranks than GPUs.
    """
    if config.placement.shared:
        engines = [group for group in engine_groups(config) if group.name == "engine"]
        gpus = sum(group.number * group.num_nodes * ceil(group.gpus) for group in engines)
        require_shared_gpus(config.trainer.num_ranks, gpus, all_of_them=config.weights.transport == "tensor")


def require_shared_gpus(num_ranks: int, num_gpus: int, *, all_of_them: bool = False) -> None:
    """Refuse more ranks than the engines have GPUs.

    Args:
        num_ranks: Ranks of the trainer.
        num_gpus: GPUs of the engines.
        all_of_them: Whether each GPU needs a rank, which hands it weights.

    Raises:
        EnvironmentNotReady: There are more, or too few.
    """
    if num_ranks > num_gpus:
        raise EnvironmentNotReady(
            f"placement.shared: trainer.num_ranks is {num_ranks}, but the engines have {num_gpus} GPUs "
            "to share: a rank needs one of its own; raise engine.num_engines or engine.tp_size, or lower "
            "trainer.num_ranks"
        )
    if all_of_them and num_ranks < num_gpus:
        raise EnvironmentNotReady(
            f"placement.shared: trainer.num_ranks is {num_ranks}, and the engines have {num_gpus} GPUs, each "
            "of which is handed weights by a rank on it (weights.transport=tensor); set trainer.num_ranks="
            f"{num_gpus}, or weights.transport=disk"
        )


def check_resources(config: Config, *, gpus: int, cpus: int) -> None:
    """Check that one machine has what Ray reserves for the processes of a run.

    Args:
        config: The run's config.
        gpus: GPUs of the machine; without any, only what names `cuda` uses them.
        cpus: Its cores.

    Raises:
        EnvironmentNotReady: It has less; Ray would wait `placement.wait_s` for it.
    """
    placement, trainer, groups = config.placement, config.trainer, engine_groups(config)
    uses = {name: device == "cuda" or (device == "auto" and gpus > 0) for name, device in _devices(config)}
    of_rank = placement.resources_per_rank.get("GPU", float(uses["trainer"]))
    parts = [group.number * group.num_nodes for group in groups]
    num_ranks = trainer.num_ranks
    if placement.shared and uses["trainer"]:  # they have a place with each engine, and its GPUs
        of_rank = 0.0
        num_ranks = sum(
            count * min(ceil(group.gpus), trainer.num_ranks)
            for count, group in zip(parts, groups, strict=True)
            if group.name == "engine"
        )
    of_engines = sum(
        count * group.gpus
        for count, group in zip(parts, groups, strict=True)
        if uses["engine"] or "GPU" in placement.resources_per_engine
    )
    cpu_parts = (
        placement.resources_per_rank.get("CPU", 0.0) * num_ranks,
        placement.resources_per_engine.get("CPU", 0.0) * sum(parts),
        placement.resources_per_rollout_worker.get("CPU", 0.0) * config.num_workers,
    )
    for what, there, needed in (
        ("GPUs", gpus, {"trainer ranks": of_rank * num_ranks, "engines": of_engines}),
        ("CPUs", cpus, dict(zip(("trainer ranks", "engines", "rollout workers"), cpu_parts, strict=True))),
    ):
        if (total := sum(needed.values())) > there:
            shares = ", ".join(f"{name} {share:g}" for name, share in needed.items() if share)
            raise EnvironmentNotReady(
                f"the run reserves {total:g} {what} ({shares}), and this machine has {there}: lower "
                "trainer.num_ranks, the number or tp_size of engines, or placement.resources_per_*, set "
                "placement.shared=true, or join a cluster with placement.ray_address"
            )


def _devices(config: Config) -> list[tuple[str, str]]:
    engine = config.engine.device if isinstance(config.engine, SGLangEngines) else "cpu"
    return [("engine", engine), ("trainer", config.trainer.device)]


def gpus_of_a_node(config: Config) -> int:
    """Return the GPUs that nodes are taken to have: as many as this machine, or 8 if it has none.

    0 if the config's engines and ranks use none.
    """
    here, devices = count_gpus(), {device for _, device in _devices(config)}
    if "cuda" in devices:
        return here or 8
    return here if "auto" in devices else 0


def placement_table(config: Config, gpus_per_node: int) -> list[str]:
    """Return the lines of a table: how many nodes a config needs, and what each of them runs.

    Args:
        config: A config whose engines and ranks run on GPUs.
        gpus_per_node: GPUs of each node.

    Returns:
        A title and a line for each run of nodes that look alike; or one line that says what fits on no node.
    """
    placement, layout, ranks = config.placement, config.trainer.layout, config.trainer.num_ranks
    asked = placement.resources_per_rank.get("GPU", 1.0)
    groups = engine_groups(config)
    for group in groups:
        if group.gpus > gpus_per_node:
            section = "engine" if group.name == "engine" else f"models.{group.name}"
            return [
                f"placement: an engine needs {group.gpus:g} GPUs of one node, and nodes have "
                f"{gpus_per_node}: raise {section}.num_nodes"
            ]
    nodes: list[_Node] = []
    per_unit = 1
    if not placement.shared:
        plenty = [{"GPU": float(gpus_per_node)}] * ranks
        per_unit = processes_per_node({"GPU": asked or 1e-3}, ranks, ranks_together(layout), plenty, plenty)
        for first in range(0, ranks, per_unit):
            node = _first_with(nodes, asked * per_unit, gpus_per_node)
            node.take(asked * per_unit)
            node.ranks += range(first, first + per_unit)
    for group in groups:
        _place_engines(nodes, group, gpus_per_node)
    if placement.shared:
        places = [node for node in nodes for _ in range(round(gpus_per_node - node.free))]
        for rank, node in enumerate(places[:ranks]):
            node.ranks.append(rank)
    title = f"placement on {len(nodes)} nodes with {gpus_per_node} GPUs"
    spans = ranks_together(layout)
    if not placement.shared and per_unit < spans:
        title += f"; groups of {spans} ranks span nodes, in parts of {per_unit}"
    return [f"{title}:", *_lines(nodes)]


def _first_with(nodes: list[_Node], gpus: float, size: int) -> _Node:
    """Return the first node with free GPUs; a further one if there is none."""
    for node in nodes:
        if node.free >= gpus:
            return node
    nodes.append(_Node(size))
    return nodes[-1]


def _place_engines(nodes: list[_Node], group: EngineGroup, size: int) -> None:
    """Spread engines over as many nodes as packing needs, the emptiest first."""
    parts = [number for number in range(group.number) for _ in range(group.num_nodes)]
    free = [node.free for node in nodes]
    for _ in parts:
        _first_with(nodes, group.gpus, size).take(group.gpus)
    for node, before in zip(nodes, free + [float(size)] * (len(nodes) - len(free)), strict=True):
        node.free = before
    for number in parts:
        chosen = max(nodes, key=lambda node: node.free)
        chosen.take(group.gpus)
        chosen.engines.setdefault(group.name, []).append(number)


def _lines(nodes: Sequence[_Node]) -> list[str]:
    """Return a line for each run of nodes with equal numbers of ranks and engines."""
    runs: list[list[_Node]] = []
    for node in nodes:
        if runs and _shape(runs[-1][-1]) == _shape(node):
            runs[-1].append(node)
        else:
            runs.append([node])
    lines, first = [], 1
    for run in runs:
        last = first + len(run) - 1
        where = f"node {first}" if first == last else f"nodes {first}-{last}"
        each = " each" if len(run) > 1 else ""
        cells = [
            _cell("rank", [rank for node in run for rank in node.ranks], len(run[0].ranks), each),
            *(
                _cell(name, [number for node in run for number in node.engines[name]], len(numbers), each)
                for name, numbers in run[0].engines.items()
            ),
        ]
        free = f"{run[0].free:g} GPUs{each} free" if run[0].free else ""
        lines.append(f"  {where}: " + "; ".join(cell for cell in [*cells, free] if cell))
        first = last + 1
    return lines


def _shape(node: _Node) -> tuple[object, ...]:
    return (len(node.ranks), node.free, *((name, len(numbers)) for name, numbers in node.engines.items()))


def _cell(name: str, numbers: Sequence[int], count: int, each: str) -> str:
    """Return how many there are of something on a node, and the numbers on all nodes of the run."""
    if not count:
        return ""
    ordered = sorted(set(numbers))
    what = f"part{'s' * (count > 1)} of {name}" if len(numbers) > len(ordered) else name + "s" * (count > 1)
    return f"{count} {what}{each} ({number_ranges(ordered)})"
