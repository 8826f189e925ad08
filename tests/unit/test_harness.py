"""Command-line agents in workspaces of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loops.agent_program import AgentProgram, Program
from agent_loops.harness import HarnessLoop, score
from agent_loops.harness import place as place_module
from agent_loops.harness.presets import PRESETS, WORDS, parse_program
from async_rl.errors import AgentLoopError, ConfigError, EnvironmentNotReady, NotScored
from async_rl.runtime.supervision import Nursery
from async_rl.types import Completion, Task
from tests.support.harness import attempt, program, source_of
from tests.support.scripted_session import make_task
from tests.support.talk import lines, talking

pytestmark = pytest.mark.real_time

HERE = __name__
PYTHON = sys.executable


def notes_of(bench: Any) -> dict[str, Any]:
    """What `async-rl inspect` shows of the attempt."""
    (notes,) = (turn.metadata["harness"] for turn in bench.session._dialogue.turns if turn.metadata)
    return notes


def scored_by(tmp_path: Path, source: str, **fields: Any) -> dict[str, Any]:
    """A score by a Python script outside of the workspace."""
    (tmp_path / "scripts").mkdir(exist_ok=True)
    (tmp_path / "scripts" / "score.py").write_text("import json, os, sys\n" + source)
    return {"files": str(tmp_path / "scripts"), "command": [PYTHON, "{files}/score.py"], **fields}


async def test_each_attempt_has_a_fresh_workspace_which_is_removed(tmp_path: Path):
    source = source_of(tmp_path / "source", a__txt="one")
    loop = HarnessLoop(
        program(
            "ask('Hi')\nprint(os.listdir('.'), os.listdir(os.environ['HOME']), os.getcwd(), sep='|')\n"
            "Path('a.txt').write_text('two'); Path(os.environ['HOME'], '.state').touch()"
        ),
        workspace=source,
    )
    folders = set()
    async with loop:
        for _ in range(2):
            bench, reason = await attempt(loop, "Hello.")
            assert reason is None
            listed, home, folder = notes_of(bench)["stdout"].split("|")
            assert (listed, home) == ("['a.txt']", "['task.md']")
            assert notes_of(bench)["changed"] == "~ a.txt"
            assert "-one\n+two" in notes_of(bench)["diff"]
            folders.add(Path(folder).parent)
    assert len(folders) == 2
    assert not any(map(Path.exists, folders))
    assert Path(source, "a.txt").read_text() == "one"


async def test_a_workspace_is_removed_when_the_attempt_is_cancelled(tmp_path: Path):
    told = Told(tmp_path)
    locked = "os.mkdir('locked'); Path('locked/file').touch(); os.chmod('locked', 0)\n"
    loop = HarnessLoop(program(f"{locked}{told.tell}import signal; signal.pause()"))
    bench, _ = talking(lines())
    async with Nursery() as nursery:
        running = nursery.start_task("attempt", loop.run(make_task(), bench.session))
        folder = Path(await told.wait())
        assert folder.exists()
        running.cancel()
    assert not folder.parent.exists()


async def test_a_program_has_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("ASYNC_RL_ENGINE_API_KEY", "secret")
    monkeypatch.setenv("WANTED", "given")
    loop = HarnessLoop(
        program(
            "ask('Hi'); print(json.dumps(dict(os.environ)))", inherit=["WANTED"], environment={"A": "{model}"}
        )
    )
    bench, _ = await attempt(loop, "Hello.")
    said = notes_of(bench)["stdout"]
    assert "secret" not in said
    assert '"WANTED": "given"' in said
    assert '"A": "policy"' in said


@pytest.mark.parametrize("where", ["argument", "file", "stdin"])
async def test_the_task_is_where_the_program_takes_it(where: str):
    read = {"argument": "sys.argv[1]", "file": "Path(sys.argv[1]).read_text()", "stdin": "sys.stdin.read()"}
    word = {"argument": ["{task}"], "file": ["{task_file}"], "stdin": []}
    loop = HarnessLoop(program(f"print('read:', {read[where]}); ask('Hi')", *word[where]))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add {model}."}]
    bench, _ = await attempt(loop, "Hello.", messages=messages)
    assert "read: Be brief.\nAdd {model}." in notes_of(bench)["stdout"].replace("\n\n", "\n")


def archived(source: str, path: Path) -> None:
    """Make a tar archive or a git bundle of a folder."""
    if path.suffix == ".tar":
        subprocess.run(["tar", "-cf", path, "-C", source, "."], check=True)
        return
    git = ["git", "-C", source, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ("init -q", "add .", "commit -qm x", f"bundle create {path} --all"):
        subprocess.run([*git, *words.split()], check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("kind", ["tar", "bundle", "named"])
async def test_a_workspace_comes_from_an_archive_or_is_named_by_the_task(tmp_path: Path, kind: str):
    source = source_of(tmp_path / "source", a__txt="one")
    path, metadata = tmp_path / f"source.{kind}", {}
    if kind == "named":
        path, metadata = tmp_path, {"workspace": "source"}
    else:
        archived(source, path)
    loop = HarnessLoop(program("ask('Hi'); print(Path('a.txt').read_text())"), workspace=str(path))
    bench, _ = await attempt(loop, "Hello.", metadata=metadata)
    assert notes_of(bench)["stdout"] == "one"


@pytest.mark.parametrize("name", ["..", "/etc", "a/../..", "absent", "", 3, "link"])
async def test_a_task_cannot_name_a_workspace_elsewhere(tmp_path: Path, name: Any):
    (tmp_path / "link").symlink_to("/etc")
    loop = HarnessLoop(program("ask('Hi')"), workspace=str(tmp_path))
    with pytest.raises(AgentLoopError, match="expected one below"):
        await attempt(loop, metadata={"workspace": name})


async def test_setup_prepares_the_workspace_and_its_failure_fails_the_attempt():
    loop = HarnessLoop(
        program("print(Path('made').read_text()); ask('Hi')"), setup=["sh", "-c", "echo ready > made"]
    )
    bench, _ = await attempt(loop, "Hello.")
    assert notes_of(bench)["stdout"] == "ready"
    with pytest.raises(AgentLoopError, match=r"setup of the workspace failed: 'sh' ended with 3"):
        await attempt(HarnessLoop(program("ask('Hi')"), setup=["sh", "-c", "exit 3"]))


RIGHT = "Path('a.txt').write_text('right'); ask('Hi')"


@pytest.mark.parametrize(
    ("does", "scoring", "fields", "reported"),
    [
        (RIGHT, "sys.exit(open('a.txt').read() != 'right')", {}, {"reward": 1.0}),
        ("ask('Hi')", "sys.exit(1)", {}, {"reward": 0.0}),
        ("ask('Hi')", "print('log'); print(0.25)", {"result": "last_line"}, {"reward": 0.25}),
        (
            "ask('Hi')",
            "json.dump({'reward': 0.5, 'tests': 3}, open(os.environ['SCORE_FILE'], 'w')); print(9)",
            {"result": "file"},
            {"reward": 0.5, "tests": 3.0},
        ),
        ("ask('Hi')", "sys.exit(json.load(sys.stdin)['answer'] != 42)", {}, {"reward": 1.0}),
    ],
)
async def test_what_a_program_has_left_is_scored(
    tmp_path: Path, does: str, scoring: str, fields: Any, reported: dict[str, float]
):
    loop = HarnessLoop(program(does), score=scored_by(tmp_path, scoring, **fields))
    bench, reason = await attempt(loop, "Hello.", answer=42)
    assert reason is None
    completion = bench.session.completion
    assert await score(make_task(), completion) == reported
    assert notes_of(bench)["score"] == reported


@pytest.mark.parametrize(
    ("scoring", "fields", "message"),
    [
        ("sys.exit(75)", {}, "could not be computed: .* ended with 75"),
        ("os.kill(os.getpid(), 9)", {}, "killed by signal 9"),
        ("sys.exit(1)", {"result": "last_line"}, "could not be computed"),
        ("print('many')", {"result": "last_line"}, "'many'; expected a number"),
        ("print('nan')", {"result": "last_line"}, "expected a number"),
        ("pass", {"result": "file"}, "wrote no file SCORE_FILE"),
        ("pass", {"command": ["sh", "-c", "no-such-program"]}, "ended with 127"),
        ("pass", {"command": ["no-such-program"]}, "does not start"),
    ],
)
async def test_the_attempt_fails_when_its_score_cannot_be_computed(
    tmp_path: Path, scoring: str, fields: Any, message: str
):
    loop = HarnessLoop(program("ask('Hi')"), score=scored_by(tmp_path, scoring, **fields))
    with pytest.raises(NotScored, match=message):
        await attempt(loop, "Hello.")


@pytest.mark.parametrize("nonzero_exit", ["fail", "score", "zero"])
async def test_an_exit_code_fails_the_attempt_unless_it_is_to_be_scored(tmp_path: Path, nonzero_exit: Any):
    given = program("ask('Hi'); sys.exit('the disk is full')")
    loop = HarnessLoop(given, score=scored_by(tmp_path, "sys.exit(0)"), nonzero_exit=nonzero_exit)
    if nonzero_exit == "fail":
        with pytest.raises(AgentLoopError, match="ended with 1: the disk is full"):
            await attempt(loop, "Hello.")
        return
    bench, reason = await attempt(loop, "Hello.")
    assert reason == (None if nonzero_exit == "score" else "failed")
    assert bench.session.completion.reported == {"reward": float(nonzero_exit == "score")}


async def test_a_score_that_takes_too_long_is_0(tmp_path: Path):
    endless = scored_by(tmp_path, "import signal; signal.pause()", timeout_s=0.01)
    bench, _ = await attempt(HarnessLoop(program("ask('Hi')"), score=endless), "Hello.")
    assert bench.session.completion.reported == {"reward": 0.0, "score_timeout": 1.0}


async def test_a_program_changes_neither_the_scoring_files_nor_what_they_import(tmp_path: Path):
    scoring = scored_by(tmp_path, "sys.exit(7)")
    cheats = (
        f"Path({str(tmp_path / 'scripts' / 'score.py')!r}).write_text('')\n"
        "for name in ('json.py', 'sitecustomize.py', 'os.py'): Path(name).write_text('raise SystemExit(0)')\n"
        "site = Path(os.environ['HOME'], '.local/lib/python3.11/site-packages'); site.mkdir(parents=True)\n"
        "(site / 'usercustomize.py').write_text('raise SystemExit(0)')\nask('Hi')"
    )
    bench, _ = await attempt(HarnessLoop(program(cheats), score=scoring), "Hello.")
    assert bench.session.completion.reported == {"reward": 0.0}


async def test_what_a_program_has_started_is_over_when_the_score_begins(tmp_path: Path):
    """Also in a session of its own: it could change the workspace meanwhile."""
    sleeper = "import os; print(os.getpid(), flush=True); import signal; signal.pause()"
    does = (
        f"child = subprocess.Popen([sys.executable, '-c', {sleeper!r}], stdout=subprocess.PIPE, "
        "start_new_session=True)\nPath('pid').write_bytes(child.stdout.readline()); ask('Hi')"
    )
    gone = (
        "path = '/proc/' + open('pid').read().strip() + '/stat'\n"
        "sys.exit(os.path.exists(path) and open(path).read().rpartition(')')[2].split()[0] not in 'ZX')"
    )
    bench, _ = await attempt(HarnessLoop(program(does), score=scored_by(tmp_path, gone)), "Hello.")
    assert bench.session.completion.reported == {"reward": 1.0}


async def counted_files(task: Task, workspace: Path, *, factor: float) -> float:
    return factor * len(os.listdir(workspace))


def cannot(task: Task, workspace: Path) -> str:
    return "good"


async def test_a_function_may_score():
    made = program("Path('a').touch(); ask('Hi')")
    loop = HarnessLoop(made, score={"function": f"{HERE}:counted_files", "args": {"factor": 0.5}})
    bench, _ = await attempt(loop, "Hello.")
    assert bench.session.completion.reported == {"reward": 0.5}
    with pytest.raises(AgentLoopError, match="'\"good\"'; expected a number"):
        await attempt(HarnessLoop(made, score=f"{HERE}:cannot"), "Hello.")


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    ("text", "reward"), [("def f(): return 4", 1.0), ("def f(): return 5", 0.0), ("", 0.0)]
)
async def test_a_file_may_be_tested_in_the_sandbox(text: str, reward: float):
    write = f"Path('solution.py').write_text({text!r})" if text else "pass"
    tests = {"function": "agent_loops.harness:file_tests", "args": {"file": "solution.py"}}
    loop = HarnessLoop(program(f"{write}; ask('Hi')"), score=tests)
    bench, _ = await attempt(loop, "Hello.", answer=["assert f() == 4"])
    assert bench.session.completion.reported["reward"] == reward


async def test_a_reward_needs_a_report():
    with pytest.raises(ValueError, match=r"agent_loop_args\.score"):
        await score(make_task(), Completion(messages=[], text="", stop_reason="completed"))


class Told:
    """A pipe by which a program tells the test that it has got somewhere."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "told"
        os.mkfifo(self._path)
        self.tell = f"print(os.getcwd(), file=open({str(self._path)!r}, 'w'), flush=True)\n"

    async def wait(self) -> str:
        return (await asyncio.to_thread(self._path.read_text)).strip()


class EndedByTest(HarnessLoop):
    """Its program reaches a limit when the test says so."""

    async def _make_program(self, *given: Any) -> AgentProgram:
        self.program = await super()._make_program(*given)
        return self.program


async def test_what_a_program_has_left_is_scored_when_its_time_is_up(tmp_path: Path):
    told = Told(tmp_path)
    loop = EndedByTest(
        program(f"ask('Hi'); Path('a').touch()\n{told.tell}import signal; signal.pause()"),
        score=scored_by(tmp_path, "sys.exit(not os.path.exists('a'))"),
    )
    bench, _ = talking(lines("Hello."))
    async with Nursery() as nursery:
        running = nursery.start_task("attempt", loop.run(make_task(), bench.session))
        await told.wait()
        loop.program.end("time")
        assert await running is None
    assert notes_of(bench)["ended"] == "time"
    assert bench.session.completion.reported == {"reward": 1.0}


async def test_a_program_is_ended_when_its_time_is_up():
    ended = Program([PYTHON, "-c", "import signal; signal.pause()"], {}, limit_s=0.01)
    assert await ended.run() == 0
    assert (ended.ended_by, ended.exit_code) == ("time", None)


@pytest.mark.parametrize("then", ["pass", "import signal; signal.pause()"])
async def test_a_program_that_fills_its_workspace_is_scored_0(
    tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(place_module, "_MEASURED_S", 0.01)
    fill = f"ask('Hi'); Path('a').write_bytes(bytes(range(256)) * 8192); {then}"
    loop = HarnessLoop(program(fill), score=scored_by(tmp_path, ""), max_workspace_mb=1)
    bench, reason = await attempt(loop, "Hello.")
    assert reason == "failed"
    assert notes_of(bench)["ended"] == "size"
    assert bench.session.completion.reported == {"reward": 0.0}


async def test_notes_fit_and_links_are_not_followed(tmp_path: Path):
    secret = tmp_path / "secret.log"
    secret.write_text("hidden")
    does = (
        "Path('big.log').write_text('x' * 100_000); Path('small.log').write_text('small')\n"
        f"os.symlink({str(secret)!r}, 'link.log'); os.mkfifo('pipe.log')\n"
        "Path(os.environ['HOME'], 'own.txt').write_text('at home'); print('y' * 50_000); ask('Hi')"
    )
    loop = HarnessLoop(program(does), collect=["*.log", "~/*.txt"])
    bench, _ = await attempt(loop, "Hello.")
    files = notes_of(bench)["files"]
    assert files.keys() == {"big.log", "small.log", "own.txt"}
    assert (files["small.log"], files["own.txt"]) == ("small", "at home")
    assert 500 < len(files["big.log"]) < 3500


async def test_a_program_that_asks_nothing_fails_the_attempt():
    with pytest.raises(AgentLoopError, match=r"no request of it was answered: .* it wrote nothing"):
        await attempt(HarnessLoop(program("pass")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": "emacs"}, "preset is 'emacs'; expected one of claude-code"),
        ({"program": {"command": ["sh"], "argument": []}}, "unknown field `argument`"),
        ({"program": {"command": []}}, "command is empty"),
        ({"program": {"command": ["no-such-program"]}}, "there is no program 'no-such-program'"),
        ({"program": {"command": ["sh"]}, "workspace": "/no/such"}, "does not exist"),
        ({"program": {"command": ["sh"]}, "timeout_s": 0}, "Expected `float` > 0"),
        ({"program": {"command": ["sh"]}, "score": {}}, "expected either command or function"),
        ({"program": {"command": ["sh"]}, "score": {"comand": []}}, "unknown field"),
        ({"program": {"command": ["sh"]}, "score": {"command": ["a"], "files": "/no/such"}}, "no files"),
        ({"program": {"command": ["sh"], "imports": ["json"]}}, "imports need a Python program"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        HarnessLoop(**arguments)


def test_presets_use_known_words_only():
    values = dict.fromkeys(WORDS, "")
    for preset in PRESETS.values():
        for text in (*preset.whole_command, *preset.environment.values()):
            text.format(**values)  # a wrong word is a KeyError


def test_a_presets_fields_may_be_extended():
    settings = parse_program({"preset": "aider", "arguments": ["a.py"], "environment": {"A": "b"}})
    assert settings.whole_command[0] == "aider"
    assert settings.whole_command[-1] == "a.py"
    assert settings.environment == {**PRESETS["aider"].environment, "A": "b"}


def test_the_guides_configs_are_accepted(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setattr("shutil.which", lambda name, **_: PYTHON)  # no program has to be installed
    blocks = re.findall(r"```yaml\n(.*?)```", (root / "docs/guide/harness.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    for block in (*blocks, (root / "examples/repair/config.yaml").read_text()):
        rollout = yaml.safe_load(block)["rollout"]
        assert rollout["agent_loop"] == "agent_loops.harness:HarnessLoop"
        HarnessLoop(**rollout["agent_loop_args"])


FORKED = """
import slow_module
here = os.getcwd() == os.environ["PWD_OF_MINE"]
print(slow_module.numbers, here, os.getppid() in slow_module.pids, sep="|")
slow_module.numbers.append(os.getpid())
ask("Hi")
"""


def forked(tmp_path: Path, source: str) -> HarnessLoop:
    """A loop whose programs are forked from a process that has imported `slow_module`."""
    module = tmp_path / "modules" / "slow_module.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text("import os\nnumbers = []\npids = {os.getpid()}\nassert os.environ['A'] == 'b'\n")
    script = tmp_path / "agent"
    given = program(source)["command"][2]
    script.write_text(f"#!{PYTHON}\n{given}")
    script.chmod(0o700)
    return HarnessLoop(
        {
            "command": [str(script)],
            "imports": ["slow_module"],
            "environment": {"PWD_OF_MINE": "{workspace}", "A": "b"},
        }
    )


@pytest.fixture
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter of programs find `slow_module`, as one finds what is installed."""
    interpreter = tmp_path / "python3"
    path = shlex.quote(str(tmp_path / "modules"))
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {PYTHON} "$@"\n')
    interpreter.chmod(0o700)
    monkeypatch.setattr(f"{__name__}.PYTHON", str(interpreter))


@pytest.mark.usefixtures("_importable")
async def test_forked_programs_share_imports_and_nothing_else(tmp_path: Path):
    loop = forked(tmp_path, FORKED)
    async with loop:
        for _ in range(2):
            bench, _ = await attempt(loop, "Hello.")
            assert notes_of(bench)["stdout"] == "[]|True|True"
        assert loop._server is not None
        assert loop._server.num_started == 1


@pytest.mark.usefixtures("_importable")
async def test_exit_codes_and_exceptions_of_forked_programs_are_theirs(tmp_path: Path):
    loop = forked(tmp_path, "ask('Hi'); sys.exit(3)")
    async with loop:
        with pytest.raises(AgentLoopError, match="ended with 3"):
            await attempt(loop, "Hello.")
    broken = forked(tmp_path, "raise ValueError('no plan')")
    async with broken:
        with pytest.raises(AgentLoopError, match="ended with 1: ValueError: no plan"):
            await attempt(broken)


@pytest.mark.usefixtures("_importable")
async def test_a_process_that_has_died_is_replaced(tmp_path: Path):
    loop = forked(
        tmp_path,
        "import slow_module; ask('Hi'); os.kill(*slow_module.pids, 9); import signal; signal.pause()",
    )
    after = "import slow_module; ask('Hi'); print(len(slow_module.pids))"
    async with loop:
        with pytest.raises(AgentLoopError, match="killed by signal 9"):
            await attempt(loop, "Hello.")
        script = Path(loop._program.command[0])
        script.write_text(f"#!{PYTHON}\n" + program(after)["command"][2])
        bench, _ = await attempt(loop, "Hello.")
        assert notes_of(bench)["stdout"] == "1"
        assert loop._server is not None
        assert loop._server.num_started == 2


@pytest.mark.usefixtures("_importable")
async def test_a_forked_program_and_its_children_are_killed_when_its_attempt_is_cancelled(tmp_path: Path):
    os.mkfifo(tmp_path / "told")
    pause = "import signal; signal.pause()"
    source = (
        f"child = subprocess.Popen([sys.executable, '-c', {pause!r}])\n"
        f"print(os.getpid(), child.pid, file=open({str(tmp_path / 'told')!r}, 'w'), flush=True)\n{pause}"
    )
    loop = forked(tmp_path, source)
    bench, _ = talking(lines())
    async with loop:
        async with Nursery() as nursery:
            running = nursery.start_task("attempt", loop.run(make_task(), bench.session))
            pids = (await asyncio.to_thread((tmp_path / "told").read_text)).split()
            running.cancel()
        assert [pid for pid in pids if runs(pid)] == []


def runs(pid: str) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_an_import_that_fails_is_told_before_the_first_attempt():
    loop = HarnessLoop({"command": [PYTHON, "-c", ""], "imports": ["no_such_module"]})
    with pytest.raises(EnvironmentNotReady, match="No module named 'no_such_module'"):
        async with loop:
            pass


def test_the_repair_example_is_scored_by_its_script(tmp_path: Path):
    example = Path(__file__).parents[2] / "examples" / "repair"
    fixed = {
        "mean": "def mean(v):\n    return sum(v) / len(v) if v else 0\n",
        "words": "def longest_word(text):\n    return max(text.split(), key=len, default='')\n",
        "ranges": "def overlap(a, b):\n    return max(0, min(a[1], b[1]) - max(a[0], b[0]) + 1)\n",
    }
    for row in map(json.loads, (example / "tasks.jsonl").read_text().splitlines()):
        sources = {
            "original": (example / "workspaces" / row["workspace"] / "solution.py").read_text(),
            "fixed": fixed[row["id"]],
            "cheats": "import os\nos._exit(0)\n",
        }
        for name, source in sources.items():
            (tmp_path / "solution.py").write_text(source)
            ran = subprocess.run(
                [PYTHON, example / "score.py"],
                input=json.dumps({"answer": row["answer"]}).encode(),
                env={"WORKSPACE": str(tmp_path)},
                stderr=subprocess.DEVNULL,
                check=False,
            )
            assert ran.returncode == (name != "fixed")
