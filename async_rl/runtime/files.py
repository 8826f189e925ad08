"""Names of files, private folders, and files that are replaced atomically."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from async_rl.errors import EnvironmentNotReady

FILE_NAME: Final = r"^\.?[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z"
"""What every name that becomes a part of a path must match: it names one file, in the folder it joins."""


def file_name(name: Any, origin: object) -> str:
    """Return a name that is read from a file, once it names a file in the folder it will be joined to.

    Args:
        name: The name, of any type that the file may hold in its place.
        origin: What holds it, for the message.

    Raises:
        ValueError: It is no plain file name.
    """
    if not isinstance(name, str) or not re.search(FILE_NAME, name):
        raise ValueError(
            f"{origin} names the file {name!r:.200}; expected a name of at most 128 letters, digits, '.', "
            "'_' and '-', without a folder"
        )
    return name


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside a path, which takes its place when the block ends without an error.

    The path may name a folder, which is removed then. What a failed block has written is removed; what a
    killed process has is left, as `.<name>.<process id>.tmp`, until the folder is written again. Only one
    process may write it at a time: one that runs on another host seems to have ended.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    left = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.tmp")
    for other in path.parent.glob(".*.tmp"):
        if (of := left.fullmatch(other.name)) and not Path("/proc", of[1]).exists():
            shutil.rmtree(other, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    scratch.rename(path)


def private_folder(path: Path) -> Path:
    """Make a folder of a known name, or take an existing one, that no other user can read or change.

    Names in `/tmp` and `/dev/shm` can be taken by anyone first.

    Returns:
        The path, whose folder has mode 0700 and belongs to this user.

    Raises:
        PermissionError: Another user made the folder, or something else has its name, such as a link.
        OSError: It cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:  # a link, a file, or the private folder of another user
        raise PermissionError(f"{path} exists and is no folder of this user ({error.strerror})") from error
    try:
        owner = os.fstat(folder).st_uid
        if owner != os.getuid():
            raise PermissionError(f"{path} belongs to the user {owner}, not to this one ({os.getuid()})")
        if stat.S_IMODE(os.fstat(folder).st_mode) != 0o700:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)
    return path


_MAX_SOCKET_PATH: Final = 107
"""The longest path of a socket on Linux, bytes."""


def socket_folder(below: int) -> Path:
    """Return a temporary folder in which sockets fit: that of TMPDIR, or /tmp if its path is too long.

    Args:
        below: The length of the longest path of a socket below it, bytes.

    Raises:
        EnvironmentNotReady: The path is too long, and /tmp cannot be used.
    """
    given = tempfile.gettempdir()
    longest = _MAX_SOCKET_PATH - below
    if len(os.fsencode(given)) <= longest:
        return Path(given)
    if os.access("/tmp", os.W_OK | os.X_OK):
        return Path("/tmp")
    raise EnvironmentNotReady(
        f"TMPDIR is {given}, of {len(os.fsencode(given))} bytes, and sockets there would exceed the limit of "
        f"{_MAX_SOCKET_PATH} bytes; /tmp cannot be written: set TMPDIR to a folder of at most {longest} bytes"
    )


_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What `flock` answers on file systems without locks."""


def try_lock(file: IO[str], *, shared: bool = False) -> bool | None:
    """Lock a file until it is closed.

    Returns:
        Whether it is locked now: False if another process has locked it, None on a file system without locks.

    Raises:
        OSError: It cannot be locked for another reason.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def is_locked(lock_file: Path) -> bool:
    """Return whether a driver runs in a folder: a driver holds the lock in it until it ends."""
    if not lock_file.exists():
        return False
    with lock_file.open() as lock:
        return try_lock(lock, shared=True) is False


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that a power cut loses nothing of it.

    Raises:
        OSError: The disk does not take it, or there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, *, mode: int | None = None, durable: bool = False) -> None:
    """Write a file so that a reader sees either the old content or the new content, never a part of it.

    The content survives a crash of the process; a power cut, which may leave nothing, only if it is durable.

    Args:
        path: The file to create or replace; its folder must exist.
        content: The whole new content.
        mode: Permission bits; None leaves them to the process's umask.
        durable: Whether to flush it to disk.

    Raises:
        OSError: The folder cannot be written or the disk is full.
    """
    partial = path.with_name(f".{path.name}.part")
    partial.unlink(missing_ok=True)  # of a killed process, or a link that somebody put there
    with partial.open("xb") as file:
        file.write(content)
    if mode is not None:
        partial.chmod(mode)
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)
