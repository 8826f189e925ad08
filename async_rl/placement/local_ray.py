"""Joins a Ray cluster, or starts Ray on this machine, closed to other users; disconnects at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.job_config import JobConfig

from async_rl.config import Config
from async_rl.errors import EnvironmentNotReady
from async_rl.run.this_machine import ray_folder
from async_rl.runtime.files import private_folder
from async_rl.runtime.signals import signal_handlers_kept
from async_rl.runtime.threads import LastingThread, call_until_cancelled

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES: Final = 256 << 20
"""Size of the object store of a local Ray: batches are files, so the store holds almost nothing."""

_LIMIT_S: Final = 300.0
"""Time limit for joining a cluster: `ray.init` waits forever if the head is lost meanwhile."""


_THREAD: Final = LastingThread("ray")
"""Starts Ray's processes, which the kernel kills with the thread that started them (PR_SET_PDEATHSIG)."""


def scratch_folder(run_dir: Path) -> Path:
    """Return a folder for the sockets and logs of a local Ray, because Ray's own are open to every user.

    Raises:
        EnvironmentNotReady: Another user has made the folder, or none is short enough.
    """
    folder = ray_folder(run_dir)
    if folder.parent != Path(tempfile.gettempdir()):
        log.warning("TMPDIR is too long for paths of sockets: those of Ray are in %s", folder)
    try:
        scratch = private_folder(folder)
    except OSError as error:
        raise EnvironmentNotReady(
            f"no folder for Ray's sockets: {error}; remove it, or set TMPDIR"
        ) from error
    for left in scratch.iterdir():
        shutil.rmtree(left, ignore_errors=True)
    return scratch


async def connect_ray(config: Config, scratch: Path, *, limit_s: float = _LIMIT_S) -> None:
    """Join the cluster that the config names, or start Ray on this machine with its files in `scratch`.

    If the caller is cancelled, Ray's connection is left in the middle, and the processes that it has started
    are killed: `exit_despite_threads` must then end this process.

    Raises:
        EnvironmentNotReady: Ray cannot be joined or started, or a cluster does not answer within `limit_s`.
    """
    try:
        # A local start has a time limit of its own.
        with signal_handlers_kept():
            async with asyncio.timeout(limit_s if config.placement.joins else None):
                await call_until_cancelled(
                    lambda: _connect_ray(config, scratch), name="ray.init", thread=_THREAD
                )
    except asyncio.CancelledError:
        _kill_processes(scratch)
        raise
    except TimeoutError as error:
        raise EnvironmentNotReady(
            f"could not {_intent(config)} in {limit_s:.0f} s: the connection started and then got no "
            "answer. Check whether the head still runs (`ray status`), and start again"
        ) from error


async def disconnect_ray() -> None:
    """Disconnect from Ray, and end the processes that it has started on this machine."""
    with signal_handlers_kept():
        await asyncio.get_running_loop().run_in_executor(_THREAD, ray.shutdown)


def _kill_processes(scratch: Path) -> None:
    """Kill the processes that a local Ray has started so far: each names its folder, or descends from one
    that does.
    """
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if str(scratch) in " ".join(process.cmdline()):
                for one in [*process.children(recursive=True), process]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()


def _intent(config: Config) -> str:
    joined = config.placement.ray_address
    return f"join the Ray cluster at {joined}" if config.placement.joins else "start Ray on this machine"


def _connect_ray(config: Config, scratch: Path) -> None:
    # Access to a port of Ray allows running code as this user. A local Ray therefore listens only on the
    # loopback interface (the only switch for this is private to Ray) and requires a token of local users.
    ray_constants.ENABLE_RAY_CLUSTER = config.placement.joins
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(ray_constants.ENABLE_RAY_CLUSTER))
    if not config.placement.joins:
        # Ray waits half a minute for its own server, which is short on a busy machine.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
        # Without a token from us Ray would write one into the user's home and leave it there.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ray would otherwise create a virtual environment if the driver was started by a tool that creates them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"async-rl-{config.run.name}"
    # Ray would put the current folder first on the import path of its processes, where any file shadows a
    # package of its name. What the config names is searched there last (`extend_import_path`).
    job = JobConfig()
    job._client_job = True
    try:
        if not config.placement.joins:
            ray.init(
                address="local",
                job_config=job,
                namespace=namespace,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                _temp_dir=str(scratch / "r"),  # Ray lets all users read this folder, but not its parent
            )
        else:
            if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
                # A token that is set for a cluster is to be used, which Ray requires to be enabled
                # explicitly.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            ray.init(
                address=config.placement.ray_address,
                job_config=job,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray raises built-in ones too, when a node is not up in half a minute
        raise EnvironmentNotReady(
            f"could not {_intent(config)}: {str(error).rstrip('.')}. Check whether the machine is "
            "overloaded, check placement.ray_address and `ray status`; a cluster that requires a token "
            "needs it here too, in RAY_AUTH_TOKEN"
        ) from error
