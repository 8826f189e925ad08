"""The limit of open files of this process: sockets, pipes, files and mapped files count."""

from __future__ import annotations

import resource
from typing import Final

_MAX_SOFT_LIMIT: Final = 1 << 20
"""Some programs visit each possible descriptor when they start, which takes minutes at 2^30."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit; child processes inherit it.

    The usual soft limit, 1024, is for programs that use `select`, which fails above it.

    Returns:
        The soft limit from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_SOFT_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_SOFT_LIMIT)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_SOFT_LIMIT if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
