"""Joins Ray, or starts one on this machine that is open to nobody else."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Final

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

from async_rl.config import Config
from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.threads import call_in_thread

_OBJECT_STORE_BYTES: Final = 256 << 20
"""Of a Ray that we start: batches are files, so the store carries next to nothing."""

_LIMIT_S: Final = 300.0
"""To join a cluster: where its head is lost meanwhile, `ray.init` waits without an end."""


def scratch_folder(run_dir: Path) -> Path:
    """A folder for the sockets and logs of a Ray that we start: Ray's own are open to every user.

    Its name is short, because paths of sockets are, and the same for each life of a run: what a killed driver
    left goes with the next.

    Raises:
        EnvironmentNotReady: When somebody else has made it.
    """
    name = hashlib.blake2s(f"{os.getuid()}:{run_dir.resolve()}".encode(), digest_size=4).hexdigest()
    scratch = Path(tempfile.gettempdir()) / f"async-rl-{name}"
    scratch.mkdir(mode=0o700, exist_ok=True)
    if scratch.is_symlink() or scratch.stat().st_uid != os.getuid():
        raise EnvironmentNotReady(f"{scratch} belongs to another user: remove it, or set TMPDIR")
    scratch.chmod(0o700)
    for left in scratch.iterdir():
        shutil.rmtree(left, ignore_errors=True)
    return scratch


async def connect(config: Config, scratch: Path, *, limit_s: float = _LIMIT_S) -> None:
    """Join the cluster that the config names, or start Ray here, with what it writes in `scratch`.

    Raises:
        EnvironmentNotReady: When neither works, or a cluster is not joined within `limit_s` seconds.
    """
    if not config.placement.joins:
        # In a thread that lives on: what Ray starts is killed with the thread that started it
        # (PR_SET_PDEATHSIG). It bounds the time itself.
        await asyncio.to_thread(_connect, config, scratch)
        return
    try:
        async with asyncio.timeout(limit_s):
            await call_in_thread(lambda: _connect(config, scratch), name="ray.init")
    except TimeoutError as error:
        raise EnvironmentNotReady(
            f"could not {_aim(config)} in {limit_s:.0f} s: it began and then did not answer. Look whether "
            "its head still runs (`ray status`), and start again"
        ) from error


def _aim(config: Config) -> str:
    joined = config.placement.ray_address
    return f"join the Ray cluster at {joined}" if config.placement.joins else "start Ray on this machine"


def _connect(config: Config, scratch: Path) -> None:
    # Whoever reaches a port of Ray runs code as us. A Ray of one machine listens on the loopback interface
    # (the switch is private to Ray, and the only one) and asks for a token, for who else is on this machine.
    ray_constants.ENABLE_RAY_CLUSTER = config.placement.joins
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(ray_constants.ENABLE_RAY_CLUSTER))
    if not config.placement.joins:
        # Without one of ours Ray would write a token into the user's home, for ever.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ray would otherwise set up a virtual environment of its own where the driver was started by a tool that
    # makes some.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"async-rl-{config.run.name}"
    try:
        if not config.placement.joins:
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=str(scratch / "r"),  # Ray opens this one to all users, not its parent
            )
        else:
            if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
                # Who sets one for a cluster means to use it; Ray would also have to be told so.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            ray.init(
                address=config.placement.ray_address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray raises plain ones too: of a node that is not up in half a minute
        raise EnvironmentNotReady(
            f"could not {_aim(config)}: {str(error).rstrip('.')}. Look whether the machine is overloaded, "
            "check placement.ray_address and `ray status`; a cluster that is closed by a token needs it here "
            "too, in RAY_AUTH_TOKEN"
        ) from error
