"""What several kinds of tests share."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.runtime.listeners import RepeatFilter

# Property tests look for counterexamples, not for speed: a loaded machine must not fail them.
settings.register_profile("async_rl", deadline=None)
settings.load_profile("async_rl")

pytest_plugins = ["tests.support.environment", "tests.support.time_limit"]

IN_VIRTUAL_TIME = ("tests/unit/", "tests/property/", "tests/simulation/")

LONGEST = ("tests/integration/", "tests/contract/", "tests/simulation/", "tests/unit/test_user_processes.py")
"""Folders whose files workers take first, so that a short file comes last and no worker waits long."""

GPU_TESTS = Path(__file__).resolve().parent / "gpu"
EXAMPLE = Path(__file__).parent.parent / "examples" / "calculator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--case", type=int, action="append", help="run only this acceptance case of routing replay"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs before torch is imported, unless only tests/gpu runs: other tests expect a CPU's results."""
    folders = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(folder.resolve().is_relative_to(GPU_TESTS) for folder in folders):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    places = [str(config.rootpath), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # actors get classes of tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:  # each worker would collect other names, and none would run
        raise pytest.UsageError(f"the name of a test has an address, give it another by ids=: {addresses[0]}")
    if wanted := set(config.getoption("--case") or ()):
        items[:] = [
            item for item in items if wanted & {n for mark in item.iter_markers("case") for n in mark.args}
        ]
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run asynchronous tests of these folders in virtual time, except those with the mark `real_time`."""
    if item.nodeid.startswith(IN_VIRTUAL_TIME) and item.get_closest_marker("real_time") is None:
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def loggers_stay_as_they_were() -> Iterator[None]:
    """Fail a test that leaves our loggers silent, and not the next one that reads the log."""
    before = _silenced()
    _forget_repeats()
    yield
    assert _silenced() == before


def _forget_repeats() -> None:
    """Let each test see all that it logs, whatever others have logged in this process before."""
    for logger in logging.root.manager.loggerDict.values():
        for each in getattr(logger, "filters", ()):
            if isinstance(each, RepeatFilter):
                each.forget()


def _silenced() -> dict[str, object]:
    loggers = {"": logging.root} | logging.root.manager.loggerDict
    ours = {name: each for name, each in loggers.items() if name.partition(".")[0] in ("", "async_rl")}
    found = {
        name: (each.level, each.disabled, each.propagate)
        for name, each in ours.items()
        if isinstance(each, logging.Logger)
    }
    normal = (logging.NOTSET, False, True)
    return {"disable": logging.root.manager.disable} | {n: v for n, v in found.items() if v != normal}


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's untrained model (`model/`) and its tasks (`data/tasks.jsonl`)."""
    folder = tmp_path_factory.mktemp("calculator")
    for script, arguments in (("make_model.py", ["model"]), ("make_data.py", ["data"])):
        subprocess.run([sys.executable, EXAMPLE / script, *arguments], cwd=folder, check=True)
    return folder
