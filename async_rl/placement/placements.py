"""Placements of engines and trainer ranks on the nodes of a cluster, kept for the whole run.

A process that needs no resources gets a placement too, so that spreading and packing also work on a CPU
cluster. When a node is lost, Ray looks for new placements for its processes; `wait_ready` waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final, Self

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_rl.errors import EnvironmentNotReady
from async_rl.run.placement_table import processes_per_node

MIN_CPUS: Final = 0.001
"""CPUs of a process that needs none: a bundle of a placement group cannot be empty, and Ray does not spread
actors that ask for nothing."""

LOG_AFTER_S: Final = 5.0
"""A wait of more seconds is logged."""

log = logging.getLogger(__name__)


class ClusterNode(msgspec.Struct, frozen=True):
    """A node that is alive, with its resources."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


class Placements:
    """One placement per process, numbered as the processes are."""

    def __init__(
        self,
        what: str,
        asked: Mapping[str, float],
        count: int,
        strategy: str,
        *,
        neighbours: bool = False,
        together: int = 1,
        asked_beside: Mapping[str, float] | None = None,
        num_beside: int = 0,
        remedy: str,
    ) -> None:
        """Store the request; nothing is requested from Ray yet.

        Args:
            what: Name of one process, for messages.
            asked: CPU, GPU and custom resources of one process, all on one node.
            count: Number of processes.
            strategy: Strategy of the placement group.
            neighbours: Whether processes on a node get consecutive numbers. After the loss of a node, numbers
                may then move to other placements, so that all processes must restart; otherwise a number
                keeps its placement.
            together: Number of consecutive processes that should share a node; it divides `count`. Where they
                do not fit on one, the largest equal parts of them that fit do.
            asked_beside: The resources of a process of another kind that runs beside one of these.
            num_beside: Number of processes beside each one, for which its place has resources too.
            remedy: Advice for a cluster without capacity.
        """
        self._what = what
        self._asked = _with_cpus(asked)
        self._asked_beside = _with_cpus(asked_beside or {})
        self._reserved = {
            name: self._asked.get(name, 0.0) + num_beside * self._asked_beside.get(name, 0.0)
            for name in (self._asked | self._asked_beside if num_beside else self._asked)
        }
        self._count = count
        self._strategy = strategy
        self._remedy = remedy
        self._group: PlacementGroup | None = None
        self._neighbours = neighbours
        self._together = together
        self._per_bundle = 1
        self._order = list(range(count))

    async def wait_ready(self, limit_s: float) -> None:
        """Wait until every process has a placement. After the loss of a node, placements may change.

        Raises:
            EnvironmentNotReady: There is no capacity within `limit_s`; the message lists the resources of
                each node.
        """
        if self._group is None:
            self._group = await asyncio.to_thread(self._request)
        try:
            async with asyncio.timeout(limit_s):
                try:
                    async with asyncio.timeout(LOG_AFTER_S):
                        await self._group.ready()
                except TimeoutError:
                    log.warning("%s\nWaiting for at most %s s", await self._no_capacity(), limit_s)
                    await self._group.ready()
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"{await self._no_capacity()}\nWaited for placement.wait_s = {limit_s}: {self._remedy}, "
                "add nodes, or raise it where nodes are started on demand"
            ) from error
        if self._neighbours:
            table = await asyncio.to_thread(placement_group_table, self._group)
            nodes = table["bundles_to_node_id"]
            self._order = group_by_node([nodes[index] for index in range(self._count // self._per_bundle)])

    def _request(self) -> PlacementGroup:
        """Request a bundle for each number of processes that share a node; blocks."""
        nodes = alive_nodes()
        self._per_bundle = processes_per_node(
            self._reserved, self._count, self._together, [n.free for n in nodes], [n.total for n in nodes]
        )
        if self._per_bundle < self._together:
            log.warning(
                "%s: groups of %d exchange the most data, but only %d of each fit on a node: the groups span "
                "several nodes",
                self._what,
                self._together,
                self._per_bundle,
            )
        bundle = {name: round(amount * self._per_bundle, 4) for name, amount in self._reserved.items()}
        bundles = [bundle] * (self._count // self._per_bundle)
        group: PlacementGroup = placement_group(bundles, strategy=self._strategy)
        return group

    async def wait_ready_again(self, number: int, limit_s: float) -> None:
        """Wait until a process that has ended has a placement: its own, if its node is alive.

        Ray gives all processes of a lost node new placements together, once it has capacity for all of them.
        Processes on other nodes do not have to wait for that.

        Raises:
            EnvironmentNotReady: There is no capacity within `limit_s`.
        """
        if not await asyncio.to_thread(self._is_placed, number):
            await self.wait_ready(limit_s)

    def _is_placed(self, number: int) -> bool:
        return self._node(number) in node_addresses()

    def _node(self, number: int) -> str:
        """Return the node that a process has a place on, by its id; blocks."""
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        return nodes[self._bundle(number)]

    def placements_beside(self, numbers: Sequence[int]) -> Self:
        """Return the placements of processes that run beside these.

        Args:
            numbers: For each of them the number of the process that it is beside.
        """
        others = copy(self)
        others._asked = self._asked_beside
        others._order, others._per_bundle = [self._bundle(number) for number in numbers], 1
        return others

    async def why_missing(self, name: str, number: int) -> str:
        """Return what a process with a placement that has not started waits for."""
        return await asyncio.to_thread(self._why_missing, name, number)

    def _why_missing(self, name: str, number: int) -> str:
        assert self._group is not None, "wait_ready comes first"
        node, bundle = self._node(number), f"group_{self._bundle(number)}_{self._group.id.hex()}"
        free = available_resources_per_node().get(node, {})  # type: ignore[no-untyped-call]
        left = {asked: free.get(f"{asked}_{bundle}", 0.0) for asked in self._asked}
        where = node_addresses().get(node)
        place = "a node that is lost, without a replacement yet" if where is None else f"node {where}"
        return "\n".join(
            [
                f"{name} asks for {_amounts(self._asked)} on {place}, where {_amounts(left)} of the run's "
                "reservation is free; with enough of it, the node is slow to start a process. "
                "What is not reserved:",
                *resource_lines(self._asked, alive_nodes()),
            ]
        )

    async def _no_capacity(self) -> str:
        nodes = await asyncio.to_thread(alive_nodes)
        return no_capacity(self._what, self._reserved, self._count, self._strategy, nodes)

    def actor_options(self, number: int) -> dict[str, Any]:
        """Return the options that start an actor on its placement."""
        assert self._group is not None, "wait_ready comes first"
        custom = {name: amount for name, amount in self._asked.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self._asked["CPU"],
            "num_gpus": self._asked.get("GPU", 0),
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle(number)
            ),
        }

    def _bundle(self, number: int) -> int:
        """Return the bundle of a process."""
        return self._order[number // self._per_bundle]


def _with_cpus(asked: Mapping[str, float]) -> dict[str, float]:
    """Return what a process asks Ray for, which is never nothing."""
    return {name: amount for name, amount in asked.items() if amount} | {"CPU": asked.get("CPU") or MIN_CPUS}


def _amounts(asked: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(asked.items()))


def group_by_node(nodes: Sequence[str]) -> list[int]:
    """Order placements so that those on one node are consecutive, nodes with the most placements first.

    Neighbouring ranks exchange the most data (tensor, then expert parallel). With the fullest nodes first, a
    group whose size divides the number of placements on each full node never spans two of these nodes.

    Args:
        nodes: The node of each placement.

    Returns:
        Indices of placements.

    Example:
        >>> group_by_node(["b", "a", "b", "c", "b", "a"])
        [0, 2, 4, 1, 5, 3]
    """
    counts = Counter(nodes)
    first = {node: nodes.index(node) for node in counts}
    return sorted(range(len(nodes)), key=lambda i: (-counts[nodes[i]], first[nodes[i]], i))


def no_capacity(
    what: str, asked: Mapping[str, float], count: int, strategy: str, nodes: Sequence[ClusterNode]
) -> str:
    """Return why processes cannot be placed, with one line of resources per node."""
    fits = sum(all(node.total.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes)
    return "\n".join(
        [
            f"Ray has no capacity for {count} x {what} ({_amounts(asked)} each on one node, {strategy}); "
            f"{fits} of {len(nodes)} nodes are large enough for one:",
            *resource_lines(asked, nodes),
        ]
    )


def resource_lines(asked: Iterable[str], nodes: Sequence[ClusterNode]) -> list[str]:
    """Return one line per node with its requested resources, CPUs and GPUs."""
    wanted = {"CPU", "GPU", *asked}
    return [
        f"  {node.name}: "
        + ", ".join(
            f"{node.free.get(name, 0):g} of {amount:g} {name} free"
            for name, amount in sorted(node.total.items())
            if name in wanted
        )
        for node in nodes
    ]


def node_addresses() -> dict[str, str]:
    """Return the addresses of nodes that are alive, by id; blocks."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def addresses_of(node_ids: Iterable[str]) -> list[str]:
    """Return the addresses of nodes with these ids; blocks.

    Raises:
        EnvironmentNotReady: One of them has left Ray's cluster.
    """
    alive, wanted = node_addresses(), list(node_ids)
    if left := sorted(set(wanted) - alive.keys()):
        raise EnvironmentNotReady(f"these nodes have left Ray's cluster: {', '.join(left)}")
    return [alive[node_id] for node_id in wanted]


def alive_nodes() -> list[ClusterNode]:
    """Return the nodes that are alive, in the order of their addresses; blocks."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    found = [
        ClusterNode(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.name)
