"""Where processes go: a place on some node for each engine and each rank, kept for as long as the run.

A process that asks for nothing gets a place too, so that what is said of spreading and packing also holds
on a CPU cluster. When a node is lost Ray looks for other places for what had its place there; until it has
found them, `ready` waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from async_rl.errors import EnvironmentNotReady

_SLIVER: Final = 0.001
"""CPUs of a process that asks for none: a bundle must have something."""

TELL_S: Final = 5.0
"""A wait that is longer is told."""

log = logging.getLogger(__name__)


class ClusterNode(msgspec.Struct, frozen=True):
    """A node that is alive, and what is on it."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


class Placements:
    """One place a process, numbered as the processes are.

    Example:
        >>> places = Places("trainer rank", {"GPU": 1}, 8, "PACK", remedy="lower trainer.num_ranks")
        >>> await places.ready(limit_s=60)
        >>> RankActor.options(**places.options(0)).remote(...)
    """

    def __init__(
        self,
        what: str,
        asked: Mapping[str, float],
        count: int,
        strategy: str,
        *,
        neighbours: bool = False,
        remedy: str,
    ) -> None:
        """Remember what to ask for; asks for nothing yet.

        Args:
            what: One process, in words.
            asked: CPU, GPU and custom resources of one process, all of one node.
            count: Processes.
            strategy: Of Ray's placement groups.
            neighbours: Whether those of a node get consecutive numbers. After a node was lost numbers may go
                to other places, so that all processes must start anew; without it a number keeps its place.
            remedy: What to do when the cluster has no room.
        """
        self._what = what
        self._asked = {name: amount for name, amount in asked.items() if amount} | {
            "CPU": asked.get("CPU") or _SLIVER
        }
        self._count = count
        self._strategy = strategy
        self._remedy = remedy
        self._group: PlacementGroup | None = None
        self._neighbours = neighbours
        self._order = list(range(count))

    async def ready(self, limit_s: float) -> None:
        """Wait until every process has its place. After a node was lost, places may be others.

        Raises:
            EnvironmentNotReady: When there was no room within `limit_s`: what was asked for, and what each
                node has.
        """
        if self._group is None:
            self._group = placement_group([self._asked] * self._count, strategy=self._strategy)
        try:
            async with asyncio.timeout(limit_s):
                try:
                    async with asyncio.timeout(TELL_S):
                        await self._group.ready()
                except TimeoutError:
                    log.warning("%s\nWaiting for at most %s s", await self._no_room(), limit_s)
                    await self._group.ready()
        except TimeoutError as error:
            raise EnvironmentNotReady(
                f"{await self._no_room()}\nThis was waited for placement.wait_s = {limit_s}: {self._remedy}, "
                "add nodes, or wait longer where nodes are started on demand"
            ) from error
        if self._neighbours:
            table = await asyncio.to_thread(placement_group_table, self._group)
            self._order = by_node([table["bundles_to_node_id"][index] for index in range(self._count)])

    async def ready_again(self, number: int, limit_s: float) -> None:
        """Wait until a process that has ended has a place: its own, if the node is there still.

        Ray gives all processes of a lost node new places together, when it has room for them all. One of
        another node has nothing to do with that wait.

        Raises:
            EnvironmentNotReady: See `ready`.
        """
        if not await asyncio.to_thread(self._is_placed, number):
            await self.ready(limit_s)

    def _is_placed(self, number: int) -> bool:
        node = placement_group_table(self._group)["bundles_to_node_id"][self._order[number]]
        alive = (one["NodeID"] for one in ray.nodes() if one["Alive"])  # type: ignore[no-untyped-call]
        return node in alive

    async def missed(self, name: str) -> str:
        """Why a process that has a place may not be there yet, for the log."""
        nodes = await asyncio.to_thread(alive_nodes)
        return "\n".join(
            [
                f"{name} is not there after {TELL_S:g} s: its node is slow, or lost and there is no other "
                "yet. The cluster:",
                *resources(self._asked, nodes),
            ]
        )

    async def _no_room(self) -> str:
        nodes = await asyncio.to_thread(alive_nodes)
        return no_room(self._what, self._asked, self._count, self._strategy, nodes)

    def options(self, number: int) -> dict[str, Any]:
        """What an actor is started with to be at its place."""
        assert self._group is not None, "ready comes first"
        custom = {name: amount for name, amount in self._asked.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self._asked["CPU"],
            "num_gpus": self._asked.get("GPU", 0),
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._order[number]
            ),
        }


def by_node(nodes: Sequence[str]) -> list[int]:
    """Indices of places such that those of a node follow each other, nodes with the most places first.

    Neighbouring ranks exchange the most (tensor, then expert parallel). With the fullest nodes first, a group
    whose size divides the places of each full node never straddles two of those.

    Args:
        nodes: Which node each place is on.

    Example:
        >>> by_node(["b", "a", "b", "c", "b", "a"])
        [0, 2, 4, 1, 5, 3]
    """
    counts = Counter(nodes)
    first = {node: nodes.index(node) for node in counts}
    return sorted(range(len(nodes)), key=lambda i: (-counts[nodes[i]], first[nodes[i]], i))


def no_room(
    what: str, asked: Mapping[str, float], count: int, strategy: str, nodes: Sequence[ClusterNode]
) -> str:
    """Why processes cannot be placed, with what each node has; one line a node."""
    one = ", ".join(f"{amount:g} {name}" for name, amount in sorted(asked.items()))
    fits = sum(all(node.total.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes)
    return "\n".join(
        [
            f"Ray has no room for {count} x {what} ({one} each on one node, {strategy}); "
            f"{fits} of {len(nodes)} nodes are large enough for one:",
            *resources(asked, nodes),
        ]
    )


def resources(asked: Iterable[str], nodes: Sequence[ClusterNode]) -> list[str]:
    """What there is of what was asked for, and of CPUs and GPUs; one line a node."""
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


def addresses() -> dict[str, str]:
    """Where nodes that are alive are reached, by id; blocks."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def alive_nodes() -> list[ClusterNode]:
    """The nodes of the cluster, in the order of their addresses; blocks."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    found = [
        ClusterNode(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.name)
