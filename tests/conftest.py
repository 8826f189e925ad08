"""What several kinds of tests share."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "calculator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--case", type=int, action="append", help="run only this acceptance case of routing replay"
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Servers and trainers share a lane, for they would be in each other's way.
        real = item.path.parent.name in ("contract", "integration") or any(
            item.get_closest_marker(mark) for mark in ("sglang", "megatron", "ray")
        )
        item.add_marker(pytest.mark.xdist_group("real" if real else item.path.name))
    if wanted := set(config.getoption("--case") or ()):
        items[:] = [
            item for item in items if wanted & {n for mark in item.iter_markers("case") for n in mark.args}
        ]


@pytest.fixture(scope="session")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's untrained model (`model/`) and its tasks (`data/tasks.jsonl`)."""
    folder = tmp_path_factory.mktemp("calculator")
    for script, arguments in (("make_model.py", ["model"]), ("make_data.py", ["model", "data"])):
        subprocess.run([sys.executable, EXAMPLE / script, *arguments], cwd=folder, check=True)
    return folder
