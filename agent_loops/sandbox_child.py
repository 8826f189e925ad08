"""The process inside the sandbox: sets up the isolation, then runs the programs that it receives.

This is a separate program (`python -I -S -u -c SOURCE SETTINGS`) that our code never imports;
`agent_loops.sandbox` is the other side and defines the settings. It needs only Linux and the standard
library.

```
 launcher   new mount, pid, network, ipc and host name spaces; an empty root with what Python needs, read-only
    └ fork  process 1 of the new pid space: other user or no capabilities, limits, then requests until EOF
```

Once it can run programs, it writes READY to descriptor 1. A request is a line (token, mode, lengths of code
and stdin), followed by both as bytes. Output goes to descriptor 1 at once; its end is a line that begins with
a control character and the request's token. A program can forge that line, so nothing outside relies on it.
A program may also ask the other side (`ask`), and is asked about its objects by requests of mode `question`:
`agent_loops.rewards_code` tests functions in this way.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # without the enums of `signal`, whose import takes milliseconds
import builtins
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds to import
    from collections.abc import Callable
    from ctypes import CDLL
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
CLONE_NEWUSER = 0x10000000
CLONE_REST = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, host name, System V IPC, processes, network: clone(2)."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 2, -100, 0x8000, 1, 2
CAPABILITY_VERSION_3 = 0x20080522
MAX_BUFFER_BYTES = 32 << 20
"""The most that buffers of socket pairs may hold, by Linux's defaults 26 MiB. Each may exceed it by half."""
READY = b"\n\x1eready\n"
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The architecture as audit(8) names it, and its column in the tables below."""
REFUSED = {
    "ptrace": (101, 117),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
}
"""System calls that no program here needs: new namespaces, other processes, and kernel interfaces with many
past vulnerabilities."""
REFUSED_UNACCOUNTED = {
    "fork": (57, -1),
    "vfork": (58, -1),
    "socket": (41, 198),
    "setsockopt": (54, 208),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "vmsplice": (278, 75),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "landlock_create_ruleset": (444, 444),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
"""System calls that hold memory outside the address space of the one process, which `memory_mb` limits: other
processes, socket buffers of any size, descriptors in flight, pinned pages, lists in the kernel."""
REFUSED_WITHOUT_NAMESPACES = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
}
PROCESSES = ("fork", "vfork")
"""What of these a shell needs; `agent_loops.sandboxes.local` bounds the memory by the number of processes."""
SOCKETPAIR, CLONE, CLONE3, FCNTL, PRLIMIT = (53, 199), (56, 220), 435, (72, 25), (302, 261)
CLONE_NEW = 0x7E020000
"""New namespaces: clone(2)."""
CLONE_THREAD, F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETPIPE_SZ = 0x10000, 6, 7, 37, 38, 1031
AST_ONLY = 0x400
"""`ast.PyCF_ONLY_AST`; the module `ast` takes milliseconds to import."""
SETUP_FAILED = 97
"""The exit code if the setup failed; the output has the reason."""
NEW_ROOT = "/tmp"
"""Where the new root is mounted; any folder works, because only this process sees it."""
SCRATCH = "/scratch"
"""The working folder; `/tmp` is a link to it. Where processes are not allowed, it alone is writable."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def main() -> None:
    """Set up the isolation, then run programs."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    sys.argv[1:] = []
    os.environ.pop("ASYNC_RL_STARTED_BY", None)  # for the reaper, which reads it from /proc
    try:
        set_up_isolation(settings)
    except OSError as error:
        print(error.strerror or error, error.filename or "", flush=True)
        os._exit(SETUP_FAILED)
    run_requests(settings)
    os._exit(0)  # without waiting for threads of the programs


# -- isolation
# -------------------------------------------------------------------------------------------------


def set_up_isolation(settings: dict[str, Any]) -> None:
    """Return in the process that may run programs; raise OSError if a part cannot be set up."""
    os.setsid()
    if settings["namespaces"]:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        user = settings["user"] if enter_namespaces(libc, settings) else None
        fork_first_process(libc)
        leave_privileges(libc, user)
    else:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if settings["user"] is not None:
            become(settings["user"])
            if not os.access(os.__file__, os.R_OK):
                raise OSError(
                    13, f"other users cannot read the interpreter in {sys.prefix}; name another: python"
                )
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        os.chdir(settings["scratch"])
    limit(settings)
    pairs = settings["namespaces"] and settings["limits"]["NOFILE"] * buffer_bytes() <= MAX_BUFFER_BYTES
    filtered = filter_calls(
        libc, alone=not settings["namespaces"], pairs=pairs, processes=settings["processes"]
    )
    if settings["namespaces"]:
        check(filtered, "a filter of system calls is refused")
    else:
        guard([os.getcwd()], [*settings["read_only"], *SYSTEM_FOLDERS, *DEVICES])


def enter_namespaces(libc: CDLL, settings: dict[str, Any]) -> bool:
    """Enter new namespaces, and return whether this process is still the host's root."""
    uid, gid = os.getuid(), os.getgid()
    is_root = uid == 0 and libc.unshare(CLONE_REST) == 0
    if not is_root:
        if uid == 0:  # in a container without the capability; root's processes cannot be limited in number
            uid = gid = settings["user"]
            become(uid)
            libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self stays root's
        check(libc.unshare(CLONE_NEWUSER), "a user namespace is refused")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        check(libc.unshare(CLONE_REST), "namespaces are refused")
    change_root(libc, settings)
    return is_root


def change_root(libc: CDLL, settings: dict[str, Any]) -> None:
    """Switch to a new root with what Python needs, read-only, and a scratch folder of limited size.

    Where processes are allowed, the root itself is writable too, within the same size.
    """
    # The folders made here lead to files of the interpreter, which programs read as another user.
    os.umask(0o022)

    def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        arguments = [None if a is None else a.encode() for a in (source, target, kind)]
        options = None if data is None else data.encode()
        check(libc.mount(*arguments, flags, options), f"mount of {target}")

    mount(None, "/", None, MS_REC | MS_PRIVATE)
    shown = dict.fromkeys(
        path for path in (*SYSTEM_FOLDERS, *settings["read_only"], *DEVICES) if os.path.exists(path)
    )
    # By descriptor, because the new root is mounted over a folder that may contain them. What is a link here
    # is a mount there, which no program can replace.
    opened = {path: os.open(path, os.O_PATH) for path in shown}
    size = f"size={settings['scratch_bytes']},nr_inodes=4096"
    of_root = f"mode=1777,{size}" if settings["processes"] else "mode=755,size=64k,nr_inodes=4096"
    mount("none", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, of_root)
    for path, descriptor in opened.items():
        if os.fstat(descriptor).st_mode & 0o170000 == 0o040000:  # a folder
            os.makedirs(NEW_ROOT + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
            os.close(os.open(NEW_ROOT + path, os.O_CREAT, 0o600))
        mount(f"/proc/self/fd/{descriptor}", NEW_ROOT + path, None, MS_BIND | MS_REC)
        os.close(descriptor)
    os.mkdir(NEW_ROOT + SCRATCH)
    if not os.path.lexists(NEW_ROOT + "/tmp"):
        os.symlink(SCRATCH, NEW_ROOT + "/tmp")
    os.chdir(NEW_ROOT)
    check(libc.syscall(REFUSED["pivot_root"][MACHINES[os.uname().machine][1]], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "leaving the host's files")
    os.chdir("/")
    if settings["processes"]:  # new folders may be made beside what is shown
        for top in {"/" + path.split("/")[1] for path in shown}:
            mount(top, top, None, MS_BIND | MS_REC)
            set_attributes(libc, top, ATTR_RDONLY | ATTR_NOSUID)
        os.chmod(SCRATCH, 0o1777)
        mount(SCRATCH, SCRATCH, None, MS_BIND)
    else:
        set_attributes(libc, "/", ATTR_RDONLY | ATTR_NOSUID)
        mount("none", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,{size}")
    os.chdir(SCRATCH)


def set_attributes(libc: CDLL, path: str, attributes: int) -> None:
    """Set attributes on a mount and all mounts below it."""
    import ctypes

    value = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr: set, clear, propagation, user ns
    size = ctypes.c_size_t(ctypes.sizeof(value))
    flags = ctypes.c_uint(AT_RECURSIVE)
    check(
        libc.syscall(REFUSED["mount_setattr"][0], AT_FDCWD, path.encode(), flags, ctypes.byref(value), size),
        "making the root read-only",
    )


def fork_first_process(libc: CDLL) -> None:
    """Continue as the first process of the new pid namespace; the launcher exits with its exit code."""
    alive, held = os.pipe()
    child = os.fork()
    if child:
        for descriptor in (0, 1, 2, alive):
            os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    os.close(held)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.set_blocking(alive, False)
    try:
        if not os.read(alive, 1):
            os._exit(SETUP_FAILED)  # the launcher died before this process would die with it
    except BlockingIOError:
        os.close(alive)


def leave_privileges(libc: CDLL, user: int | None) -> None:
    """Become another user, or drop all capabilities in the user namespace; setuid files have no effect."""
    import ctypes

    if user is not None:
        become(user)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def filter_calls(libc: CDLL, *, alone: bool, pairs: bool, processes: bool) -> int:
    """Refuse system calls: those of the tables, new processes, and what fills memory through `fcntl`.

    Where processes are allowed, none may have new namespaces, or change the limits of another one: the first
    process of the sandbox has the same user.

    Args:
        libc: The C library.
        alone: Whether there are no namespaces, so that signals to other processes are refused.
        pairs: Whether pairs of Unix sockets are allowed.
        processes: Whether new processes are allowed.

    Returns:
        0, or -1 if the kernel refuses the filter (errno).

    Source: seccomp(2); the numbers are from the kernel's table of each architecture.
    """
    import ctypes

    architecture, column = MACHINES[os.uname().machine]
    allowed = PROCESSES if processes else ()
    refused = [*REFUSED.values()]
    refused += [numbers for name, numbers in REFUSED_UNACCOUNTED.items() if name not in allowed]
    refused += REFUSED_WITHOUT_NAMESPACES.values() if alone else ()
    code: list[bytes] = []

    def add(kind: int, k: int, jump_true: int = 0, jump_false: int = 0) -> None:
        code.append(kind.to_bytes(2, "little") + bytes([jump_true, jump_false]) + k.to_bytes(4, "little"))

    load, equal, at_least, some_bits, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM; ENOSYS makes libc use `clone`
    add(load, 4)
    add(equal, architecture, 1, 0)
    add(leave, refuse)
    add(load, 0)
    add(at_least, 0x40000000, 0, 1)  # the x32 numbers of x86
    add(leave, refuse)
    for numbers in refused:
        if numbers[column] >= 0:
            add(equal, numbers[column], 0, 1)
            add(leave, refuse)
    add(equal, CLONE3, 0, 1)  # a filter cannot see its flags
    add(leave, unknown)
    add(equal, CLONE[column], 0, 4)
    add(load, 16)  # the low half of the first argument
    add(some_bits, CLONE_NEW if processes else CLONE_THREAD, *((0, 1) if processes else (1, 0)))
    add(leave, refuse)
    add(leave, allow)
    if processes:
        add(equal, PRLIMIT[column], 0, 4)
        add(load, 16)
        add(equal, 0, 1, 0)  # itself
        add(leave, refuse)
        add(leave, allow)
    add(equal, SOCKETPAIR[column], 0, 4)
    add(load, 16)
    add(equal, 1 if pairs else 0xFFFF, 1, 0)  # Unix
    add(leave, refuse)
    add(leave, allow)
    commands = (F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETPIPE_SZ)
    add(equal, FCNTL[column], 0, len(commands) + 3)
    add(load, 24)
    for distance, command in zip(range(len(commands), 0, -1), commands, strict=True):
        add(equal, command, distance, 0)
    add(leave, allow)
    add(leave, refuse)
    add(leave, allow)
    program = b"".join(code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = len(code).to_bytes(8, "little") + ctypes.addressof(buffer).to_bytes(8, "little")
    result: int = libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)), 0, 0)
    return result


def buffer_bytes() -> int:
    """Return the buffer size of a new socket, which hosts may have made large; asyncio needs a pair."""
    import _socket

    pair = _socket.socketpair()
    size: int = pair[0].getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF)
    for end in pair:
        end.close()
    return size


def become(user: int) -> None:
    """Become another user permanently, with no group except its own."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def limit(settings: dict[str, Any]) -> None:
    """Set the limits of the kernel, bounded by those of the host."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for name, value in settings["limits"].items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def check(result: int, what: str) -> None:
    """Raise OSError if a call into the C library has failed."""
    if result != 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def guard(writable: list[str], readable: list[str]) -> None:
    """Refuse what an audit hook sees: processes, sockets, foreign functions, files elsewhere.

    This prevents accidents. It is no security boundary: malicious code can circumvent the hooks of its own
    interpreter.
    """
    may_read = tuple(os.path.realpath(path) for path in (*readable, *writable))
    may_write = tuple(os.path.realpath(path) for path in writable)
    realpath, is_text, writing = (
        os.path.realpath,
        (str, bytes),
        os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    )
    refused = (
        "socket.",
        "ctypes.",
        "subprocess.",
        "os.fork",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.kill",
        "pty.",
        "gc.get_",
        "code.__new__",
        "syslog.",
        "fcntl.",
        "signal.pthread",
        "resource.",
    )
    modules = {"_ctypes", "ctypes", "_posixsubprocess", "_socket", "_testcapi", "_testinternalcapi"}
    paths = {
        "os.listdir",
        "os.scandir",
        "os.chdir",
        "os.mkdir",
        "os.rmdir",
        "os.remove",
        "os.rename",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "os.chown",
        "os.utime",
        "os.setxattr",
        "os.removexattr",
    }
    looking = {"os.listdir", "os.scandir", "os.chdir"}

    def inside(path: str | bytes, folders: tuple[str, ...]) -> bool:
        real = realpath(path.decode(errors="surrogateescape") if isinstance(path, bytes) else path)
        return any(real == folder or real.startswith(folder + "/") for folder in folders)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(refused) or (event == "import" and arguments[0] in modules):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event == "open":
            path, mode, flags = arguments
            write = (flags or 0) & writing or any(c in (mode or "") for c in "wax+")
            if isinstance(path, is_text) and not inside(path, may_write if write else may_read):
                raise PermissionError(f"{path!r} is outside the sandbox")
        elif event in paths:
            for path in arguments[:2]:
                folders = may_read if event in looking else may_write
                if isinstance(path, is_text) and not inside(path, folders):
                    raise PermissionError(f"{path!r} is outside the sandbox")

    sys.addaudithook(hook)


# -- programs ----------------------------------------------------------------------------------------------


channel: Channel
"""The channel of this process."""


class Channel:
    """The pipes to the other side, and the token of the current request."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(0), "rb")
        self.output = os.dup(1)
        self.token = b""

    def write_line(self, *words: bytes) -> None:
        """Write a line that is not output of a program."""
        os.write(self.output, b"\n\x1e%s\n" % b" ".join((self.token, *words)))


def run_requests(settings: dict[str, Any]) -> None:
    """Run programs until the end of the input."""
    global channel
    channel = Channel()
    sys.path[:] = [path for path in sys.path if path] + settings["import_paths"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # of `site`, which is left out
    sys.set_int_max_str_digits(0)  # the limits of a program bound its conversions, too
    names = {"__name__": "__main__", "__builtins__": builtins}
    objects: list[Any] = []

    os.write(channel.output, READY)
    while line := channel.requests.readline():
        channel.token, mode, num_code, num_stdin = line.split()
        code = channel.requests.read(int(num_code)).decode()
        set_stdin(channel.requests.read(int(num_stdin)))
        if mode == b"question":
            answer = answer_question(code, names, objects)
            ended = "done"
        else:
            answer = b""
            ended = run_program(code, names, mode.startswith(b"echo"))
            if mode.endswith(b"last"):
                end_programs(names)
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None and not stream.closed:
                    stream.flush()
            except Exception:  # the program may have replaced the stream
                ended = "error"
        channel.write_line(ended.encode(), answer)


def ask(question: bytes) -> bytes:
    """Return the other side's answer to one line; a program that it does not expect to ask is ended."""
    channel.write_line(b"ask", question)
    return channel.requests.read(int(channel.requests.readline()))


def set_stdin(data: bytes) -> None:
    """Replace standard input by this data."""
    if data:
        with open("stdin", "wb") as file:
            file.write(data)
    descriptor = os.open("stdin" if data else "/dev/null", os.O_RDONLY)
    if data:
        os.remove("stdin")
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process


def run_program(code: str, names: dict[str, Any], echo: bool) -> str:
    """Run a program, and print the value of its last line as a notebook does if `echo` is set."""
    import _ast

    file = os.path.join(os.getcwd(), "program.py")
    try:
        with open(file, "w") as source:  # tracebacks show its lines
            source.write(code)
    except (OSError, UnicodeError):
        pass  # the scratch folder is full; tracebacks lack the lines
    try:
        tree: Any = compile(code, file, "exec", AST_ONLY)
        last = None
        if echo and tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = compile(_ast.Expression(tree.body.pop().value), file, "eval")
        exec(compile(tree, file, "exec"), names)
        if last is not None and (value := eval(last, names)) is not None:
            print(repr(value))
    except SystemExit as error:
        if error.code in (None, 0):
            return "done"
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return "exit"
    except BaseException as error:  # programs may raise anything
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename != file:
            traceback = traceback.tb_next
        sys.__excepthook__(type(error), error.with_traceback(traceback), traceback)
        return "error"
    return "done"


def end_programs(names: dict[str, Any]) -> None:
    """Do what the end of an interpreter does: wait for threads, call exit handlers, and free variables.

    As there, errors do not change the exit code.
    """
    import atexit

    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # also ends idle workers of executors
        atexit._run_exitfuncs()
        if len(sys._current_frames()) == 1:  # daemon threads would miss them
            names.clear()  # closes files
    except BaseException as error:  # programs may raise anything
        sys.__excepthook__(type(error), error, error.__traceback__)


# -- values between interpreters -----------------------------------------------------------------------------


def answer_question(text: str, names: dict[str, Any], objects: list[Any]) -> bytes:
    """Return the value of a name, an attribute or a call as a line of JSON, or which error it raised."""
    import json

    def refer(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        question, subject, *more = decode(json.loads(text), objects.__getitem__)
        if question == "name":
            value = names[subject]
        elif question == "attribute":
            value = getattr(subject, more[0])
        elif question == "items":
            value = list(subject)
        else:
            value = subject(*more[0], **more[1])
        return json.dumps(["value", encode(value, refer)]).encode()
    except BaseException as error:  # programs may raise anything
        mro = type(error).__mro__
        kind = next(each.__name__ for each in mro if each.__module__ == "builtins")
        return json.dumps(["error", kind]).encode()


def encode(value: Any, refer: Callable[[object], int]) -> Any:
    """Return a value as JSON data: plain data as its exact base type, anything else as a reference."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= 64 else ["i", hex(number)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytes):
        return ["b", value.hex()]
    if isinstance(value, dict):
        return ["d", *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    for tag, kind in TAGS.items():
        if isinstance(value, kind):
            return [tag, *(encode(item, refer) for item in value)]
    return ["r", refer(value)]


def decode(data: Any, refer: Callable[[int], object]) -> Any:
    """Return the value that `encode` has written.

    Raises:
        ValueError: `encode` writes no such data.
    """
    match data:
        case None | bool() | int() | float() | str():
            return data
        case ["i", str(digits)]:
            return int(digits, 16)
        case ["c", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["b", str(digits)]:
            return bytes.fromhex(digits)
        case ["r", int(number)] if number >= 0:
            return refer(number)
        case ["d", *pairs]:
            return {decode(key, refer): decode(item, refer) for key, item in pairs}
        case [str(tag), *items] if tag in TAGS:
            return TAGS[tag](decode(item, refer) for item in items)
    raise ValueError("no such data")


TAGS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}

main()
