"""Runs as many tests as a time allows, in an order of files drawn from a text, and names the rest.

`pytest --minutes 20 --order "$(git rev-parse HEAD)"`: over many commits, each file gets its turn.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test later")
    parser.addoption("--order", help="shuffle the files by this text")
    parser.addoption("--end-s", type=float, help="the same as --minutes, in seconds of the clock")


def pytest_configure(config: pytest.Config) -> None:
    """Turn minutes into a time of day, which workers of pytest-xdist inherit."""
    if config.option.minutes is not None and config.option.end_s is None:
        config.option.end_s = time.time() + 60 * config.option.minutes


@pytest.hookimpl(trylast=True)  # after conftest.py has sorted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.order is not None:
        files = sorted({item.path for item in items})
        random.Random(config.option.order).shuffle(files)
        places = {file: place for place, file in enumerate(files)}
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end_s = item.config.option.end_s
    if end_s is not None and time.time() > end_s:
        item.user_properties.append(("no_time_for", item.nodeid.partition("::")[0]))
        pytest.skip("no time left")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that this comes after its last line
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None:  # in a worker of pytest-xdist
        return
    skipped = [
        dict(report.user_properties)
        for report in terminal.stats.get("skipped", ())
        if hasattr(report, "user_properties")
    ]
    files = Counter(each["no_time_for"] for each in skipped if "no_time_for" in each)
    if files:
        terminal.write_line(f"NOT RUN, as {session.config.option.minutes:g} minutes were over:")
    for file, number in sorted(files.items()):
        terminal.write_line(f"  {file}: {number} {'test' if number == 1 else 'tests'}")
