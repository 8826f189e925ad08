"""Programs that try to get out of the sandbox, or to take more than they are given."""

import asyncio
import gc
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent_loops.sandbox import Limits, ProgramResult, Python, PythonSession, Sandbox
from async_rl.errors import ConfigError, EnvironmentNotReady, ToolError
from tests.support.environment import SYSTEM_PYTHON
from tests.support.scripted_session import make_task

pytestmark = pytest.mark.real_time

TIGHT = {
    "wall_s": 60.0,
    "cpu_s": 1,
    "max_processes": 8,
    "memory_mb": 256,
    "scratch_mb": 8,
    "max_output_bytes": 2000,
}


def isolated(**limits: object) -> Sandbox:
    """Return a sandbox with kernel isolation."""
    return Sandbox(Limits(**{**TIGHT, **limits}))


async def run(code: str, stdin: str = "", **limits: object) -> ProgramResult:
    return await isolated(**limits).run_program(code, stdin=stdin)


@pytest.mark.needs("namespaces")
async def test_program_reads_prints_and_runs_an_event_loop_as_if_it_were_alone():
    before = os.umask(0o077)  # as a run's: the interpreter finds its modules all the same
    try:
        ran = await run(
            "import asyncio, _socket, json, sys\n"
            "async def f(): await asyncio.sleep(0); return int(input()) * 2\n"
            "print(json.dumps([asyncio.run(f())]), sys.stdin.read())",
            stdin="21\nÄpfel",
        )
    finally:
        os.umask(before)
    assert (ran.output, ran.ended) == ("[42] Äpfel\n", "done")


@pytest.mark.needs("namespaces")
async def test_traceback_shows_the_programs_own_lines_when_it_raises():
    ran = await run("def f():\n    return 1 / 0\nf()")
    assert ran.ended == "error"
    assert "line 2, in f\n    return 1 / 0" in ran.output
    assert "in run\n" not in ran.output


HOARDS = {
    "socket buffers": """
pairs = []
while True:
    pair = socket.socketpair()
    pairs.append(pair)
    for end in pair:
        try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        except OSError: pass
        end.setblocking(False)
        try:
            while True: held += end.send(bytes(1 << 16))
        except OSError: pass
""",
    "pipes": """
while True:
    out, into = os.pipe()
    try: fcntl.fcntl(into, 1031, 1 << 20)
    except OSError: pass
    os.set_blocking(into, False)
    try:
        while True: held += os.write(into, bytes(1 << 16))
    except OSError: pass
""",
    "record locks": """
for n in range(100):
    file = os.open(str(n), os.O_CREAT | os.O_RDWR)
    for start in range(0, 10_000, 2):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
        held += 300
""",
    "timers": """
libc = ctypes.CDLL(None)
while True:
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_int())): raise OSError
    held += 300
""",
}
"""Ways to hold memory that is not in the address space. Each raises OSError when it may hold no more."""


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("name", HOARDS)
async def test_memory_outside_the_address_space_is_bounded(name: str):
    code = (
        "import ctypes, fcntl, os, socket\nheld = 0\ntry:\n    "
        + HOARDS[name].strip().replace("\n", "\n    ")
        + "\nexcept (OSError, AttributeError):\n    pass\nprint(held)"
    )
    ran = await run(code, memory_mb=64, scratch_mb=16, cpu_s=10, wall_s=20)
    assert ran.ended == "done"
    assert int(ran.output) <= 32 << 20


def errors_of(statements: Iterable[str]) -> str:
    """A program that tries each statement and prints its error, or `done`."""
    return (
        f"for code in {list(statements)!r}:\n"
        "    try: exec(code)\n"
        "    except Exception as error: print(repr(error))\n"
        "    else: print('done')"
    )


@pytest.mark.needs("namespaces")
async def test_program_is_refused_more_when_it_takes_too_much():
    refused = {
        "import os; os.fork()": "Error(",
        "import os; os.posix_spawn('/bin/true', ['true'], {})": "Error(",
        "import os; os.system('true') and 1 / 0": "ZeroDivisionError",
        "bytearray(1 << 30)": "MemoryError",
        "open('big', 'wb').write(bytes(16 << 20))": "OSError",
        "import socket as s; s.send_fds(s.socketpair()[0], [b'x'], [0])": "Operation not permitted",
        "import os; os.memfd_create('hidden')": "Operation not permitted",
        "for i in range(9): open(f'{i}', 'wb').write(bytes(1 << 20))": "No space left on device",
        "import threading as t\nfor _ in range(99): t.Thread(target=t.Event().wait, daemon=True).start()": (
            "thread"
        ),
    }
    ran = await run(errors_of(refused))
    assert ran.ended == "done"
    for line, error in zip(ran.output.splitlines(), refused.values(), strict=True):
        assert error in line


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "killed"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("while True: print('x' * 99)", "output"),
        ("import os; os._exit(3)", "exit"),
        ("raise SystemExit('bye')", "exit"),
    ],
)
async def test_program_is_ended_when_it_goes_too_far(code: str, ended: str):
    ran = await run(code)
    assert ran.ended == ended
    assert len(ran.output) <= TIGHT["max_output_bytes"]


@pytest.mark.needs("namespaces")
async def test_output_is_kept_when_the_program_runs_past_its_time():
    ran = await run("print('so far', flush=True)\nimport time\ntime.sleep(600)", wall_s=2.0)
    assert (ran.output, ran.ended, ran.interpreter_ended) == ("so far\n", "time", True)


@pytest.mark.needs("namespaces")
async def test_nothing_of_ours_is_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-7")
    held = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(held, True)
    code = (
        "import os\nprint(sorted(os.environ), os.getuid(), os.getpid())\n"
        "for fd in range(3, 200):\n    try: print(fd, os.read(fd, 9) if os.fstat(fd).st_size else '')\n"
        "    except OSError: pass\n"
    )
    try:
        ran = await run(code)
    finally:
        os.close(held)
    environment, *descriptors = ran.output.splitlines()
    assert environment.startswith(("['HOME', 'LANG', 'LC_CTYPE'", "['HOME', 'LANG', 'OMP"))
    assert environment.endswith(" 1")
    assert os.getuid() != 0 or "] 0 1" not in environment
    assert [line for line in descriptors if "root" in line] == []


@pytest.mark.needs("namespaces")
async def test_files_of_the_host_are_not_there():
    hidden = ["/proc/1/environ", "/proc/self/environ", "/etc/passwd", "/home", str(Path(__file__).parent)]
    ran = await run(f"import os; print([path for path in {hidden} if os.path.exists(path)])")
    assert ran.output == "[]\n"


@pytest.mark.needs("namespaces")
async def test_nothing_can_be_written_outside_of_the_scratch_folder():
    paths = ["/usr/new", "/new", "/dev/new", "/lib/../usr/bin/new"]
    ran = await run(errors_of(f"open({path!r}, 'w')" for path in paths))
    errors = ran.output.splitlines()
    assert len(errors) == len(paths)
    assert all("Error(" in error for error in errors), errors
    assert not any(map(os.path.exists, paths))


@pytest.mark.needs("namespaces")
async def test_no_way_back_leads_out_of_the_walls():
    calls = {
        "remount": "l.mount(None, b'/', None, 0x1020, None)",
        "unmount": "l.umount2(b'/usr', 2)",
        "new user namespace": "l.unshare(0x10000000)",
        "clone into one": "l.syscall(56, 0x10000000, 0, 0, 0, 0)" if os.uname().machine == "x86_64" else "-1",
        "become root": "l.setuid(0) or -1 if __import__('os').getuid() else -1",
        "chroot": "l.chroot(b'.')",
        "ptrace": "l.ptrace(0, 0, 0, 0)",
        "rules": "l.syscall(444, 0, 0, 1)",
        "watches": "l.inotify_init()",
        "pages in pipes": "l.vmsplice(__import__('os').pipe()[1], None, 0, 0)",
        "shared memory": "l.shmget(0, 4096, 0o1600)",
        "socket to the host": "l.socket(40, 1, 0)",
        "netlink": "l.socket(16, 3, 0)",
    }
    ran = await run(
        "import ctypes\nl = ctypes.CDLL(None)\n" + "\n".join(f"print({c}, {n!r})" for n, c in calls.items())
    )
    assert ran.output.splitlines() == [f"-1 {name}" for name in calls]


@pytest.mark.needs("namespaces")
async def test_host_cannot_be_reached_over_the_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = await run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert "Operation not permitted" in ran.output


@pytest.mark.needs("namespaces")
async def test_process_and_scratch_are_gone_when_the_caller_is_cancelled():
    sandbox = isolated(wall_s=60.0)
    async with sandbox.interpreter() as interpreter:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await interpreter.run_program("import time; time.sleep(600)")
        pid = interpreter.process.pid
    assert not os.path.exists(f"/proc/{pid}")
    gc.collect()  # a transport left open would warn, which fails a test


@pytest.mark.needs("namespaces")
async def test_variables_last_as_long_as_the_trajectory_when_the_tool_is_stateful():
    tool = PythonSession(**TIGHT)
    state = tool.create(make_task())
    assert await tool.execute(state, "x = 20") == "(no output)"
    assert await tool.execute(state, "x + 1") == "21\n"
    with pytest.raises(ToolError, match=r"processor time .* Its variables are gone"):
        await tool.execute(state, "while True: pass")
    assert "NameError" in await tool.execute(state, "x")
    (interpreter,) = state
    await tool.release(state)
    assert interpreter.process.returncode is not None
    assert state == []


@pytest.mark.needs("namespaces")
async def test_programs_share_nothing_when_the_tool_is_stateless():
    tool = Python(**TIGHT)
    await tool.execute("x = 20; open('left', 'w').write('behind')")
    assert await tool.execute("import os; [name for name in os.listdir() if name != 'program.py']") == "[]\n"
    with pytest.raises(ToolError, match=r"more than 2000 bytes and was ended\. It had printed:\nxx"):
        await tool.execute("print('x' * 5000)")


def guarded() -> Sandbox:
    return Sandbox(Limits(**TIGHT, isolation="guarded", python=SYSTEM_PYTHON))


@pytest.mark.needs("guarded")
async def test_interpreter_refuses_when_the_sandbox_is_guarded():
    forbidden = (
        "import socket",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.kill(os.getppid(), 0)",
        "open('/etc/passwd').read()",
        "import os; print(open(f'/proc/{os.getppid()}/environ').read())",
        "open('/tmp/outside-of-the-sandbox', 'w')",
        "import os; os.symlink('/etc/passwd', 'x'); open('x').read()",
        "import os; os.listdir('/')",
    )
    ran = await guarded().run_program(errors_of(forbidden))
    errors = ran.output.splitlines()
    assert len(errors) == len(forbidden)
    assert all("PermissionError" in error or "OSError" in error for error in errors), errors
    assert not os.path.exists("/tmp/outside-of-the-sandbox")


@pytest.mark.needs("guarded")
async def test_program_works_and_its_folder_is_removed_when_the_sandbox_is_guarded():
    ran = await guarded().run_program(
        "import os, json, math\nopen('a', 'w').write('b')\nprint(os.getcwd(), open('a').read(), math.pi)"
    )
    folder, *rest = ran.output.split()
    assert rest == ["b", "3.141592653589793"]
    assert not os.path.exists(folder)


@pytest.mark.needs("namespaces")
async def test_packages_can_be_imported_when_the_limits_name_their_folder(tmp_path: Path):
    (tmp_path / "helper.py").write_text("value = 7")
    tmp_path.chmod(0o755)
    ran = await run(
        "import helper; print(helper.value)\nopen(helper.__file__, 'w')", import_paths=(str(tmp_path),)
    )
    assert ran.output.startswith("7\n")
    assert "Read-only file system" in ran.output


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"memory": 3}, "unknown field `memory`.*memory_mb"),
        ({"cpu_s": 0}, "cpu_s"),
        ({"import_paths": ["/nowhere"]}, "'/nowhere', which is not a folder"),
        ({"import_paths": ["/usr/.."]}, "contains a home folder"),
        ({"import_paths": [str(Path.home())]}, "contains a home folder"),
    ],
)
def test_config_error_when_the_limits_cannot_be(limits: dict, error: str):
    with pytest.raises(ConfigError, match=error):
        Python(**limits)


def test_environment_error_says_why_and_what_to_do_when_the_walls_cannot_be_built():
    with pytest.raises(EnvironmentNotReady, match=r"refuses the isolation.*choose isolation: guarded"):
        Sandbox(Limits(python="/bin/true"))


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("place", ["bin", "tools/deep/bin"])
async def test_a_home_folder_is_not_shown_when_the_interpreter_lies_in_it(tmp_path: Path, place: str):
    key = tmp_path / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("secret")
    python = tmp_path / place / "python3"
    python.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), python)
    tmp_path.chmod(0o755)
    beside = python.parent / "token"
    beside.write_text("secret")
    ran = await run(
        "import ctypes, os, ssl, sys\n"
        f"print(sys.executable, os.path.exists({str(key)!r}), os.path.exists({str(beside)!r}))\n"
        "print(sorted(os.listdir(sys.base_prefix)))",
        python=str(python),
    )
    assert ran.output.splitlines() == [f"{python} False False", "['lib']"]
