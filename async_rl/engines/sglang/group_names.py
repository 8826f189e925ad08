"""Names several process groups in the one field that SGLang's request has for one.

`abortable_groups.py` reads it in the server; the client has no torch.
"""

from __future__ import annotations

from collections.abc import Iterable


def join_groups(groups: Iterable[tuple[str, int]]) -> str:
    """Return a name for groups, each with the number of tensors that are received in it.

    Example:
        >>> join_groups([("w-0", 3), ("w-8", 1)])
        'w-0:3,w-8:1'
    """
    return ",".join(f"{name}:{count}" for name, count in groups)


def are_joined(name: str) -> bool:
    """Return whether `join_groups` has made a name: the driver knows that the server reads it."""
    return ":" in name


def split_groups(name: str, count: int) -> list[tuple[str, int]]:
    """Return what `join_groups` was given; a plain name is of a group in which `count` tensors are received.

    Example:
        >>> split_groups("w-0:3,w-8:1", 4), split_groups("w-0", 4)
        ([('w-0', 3), ('w-8', 1)], [('w-0', 4)])
    """
    if not are_joined(name):
        return [(name, count)]
    parts = (part.rpartition(":") for part in name.split(","))
    return [(group, int(number)) for group, _, number in parts]
