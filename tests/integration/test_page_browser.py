"""The live page and the report in headless Chromium, with the window of a computer and of a phone."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from async_rl.observability.page.html_report import write_report
from tests.support.browser import Browser, Tab, browser
from tests.support.environment import program
from tests.support.finished_run import HOSTILE, LOG, records, write_run_folder
from tests.support.watched_run import now, watched

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.asyncio(loop_scope="module")]

DRAWN = "document.querySelectorAll('figure.chart canvas').length > 20"

# The names of empty charts.
BLANK = """[...document.querySelectorAll('figure.chart canvas')].filter((canvas) => {
  if (canvas.clientWidth < 100 || canvas.getBoundingClientRect().left < 0) return true;
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(pixels.filter((_, i) => i % 4 === 2)).size < 8;
}).map((canvas) => canvas.closest('figure').id)"""


# The least contrast of text with its background, by WCAG 2.1, 1.4.3: 4.5 for AA.
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const paint = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [];
  for (const one of document.querySelectorAll('h1,h2,h3,p,th,td,li,code,button,a,.chip,svg text')) {
    if (!one.textContent.trim() || one.closest('[hidden], .skip') || !one.getClientRects().length) continue;
    const behind = [];
    for (let up = one; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const style = getComputedStyle(one);
    const ink = one instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(paint([...behind, ink])), light(paint(behind))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push([one.tagName, one.className.toString(), one.textContent.slice(0, 30), ratio]);
  }
  return bad;
})()"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with browser(program("chromium"), tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def tab(chromium: Browser) -> AsyncIterator[Tab]:
    async with chromium.open_tab() as made:
        yield made


def text_of(tab: Tab, selector: str) -> Any:
    return tab.evaluate(f"document.querySelector({selector!r}).innerText")


async def press(tab: Tab, key: str, code: int, text: str = "") -> None:
    """Press and release a key."""
    for kind in ("keyDown", "keyUp"):
        await tab.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                       windowsVirtualKeyCode=code)  # fmt: skip


async def hover(tab: Tab, chart: str) -> None:
    """Move the pointer into the middle of a chart."""
    box = await tab.evaluate(
        f"(() => {{ const plot = document.querySelector('#chart-{chart} .u-over');"
        "plot.scrollIntoView({block: 'center'}); const box = plot.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    await tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    await tab.until(f"document.querySelector('#chart-{chart} .readout')")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_shows_the_run_at_any_width(tab: Tab, width: int, dark: bool) -> None:
    steps = records(120)
    async with watched(now, lambda: steps, refresh_s=1.0) as (url, _):
        await tab.open(url, width=width, dark=dark)
        await tab.until(DRAWN)
        assert await tab.evaluate("document.title") == "calculator-moe · async-rl"
        assert await text_of(tab, "#tile-reward") == f"{steps[-1].reward_mean:.3g}"
        assert await text_of(tab, "#steps") == "step 120 of 200"
        assert (await text_of(tab, "#stages tr")).split() == ["trained", "6,514", "97%"]
        assert await text_of(tab, "#dispatched") == "6,684 dispatched"
        engines = await text_of(tab, "#engines")
        assert "quarantined" in engines
        assert "24 calls" in engines
        assert "tool search" in await text_of(tab, "#slowest")
        assert "7 min" in await text_of(tab, "#slowest")
        assert await text_of(tab, "#slowest code") == "0190c2f4a0…"
        assert "5 of 8 groups are ready" in await text_of(tab, "#report")
        failures = await text_of(tab, "#failures")
        assert failures.split()[:4] == ["sandbox", "lost", "1,204", "12%"]
        assert failures.count("no container left") == 3
        # Strings from a dataset are shown as text, not as markup.
        assert HOSTILE in await tab.evaluate("document.body.textContent")
        assert await tab.evaluate("document.querySelectorAll('img, main script').length") == 0

        assert await tab.evaluate("document.documentElement.scrollWidth") == width
        assert await tab.evaluate("innerWidth") == width
        assert await tab.evaluate(BLANK) == []
        assert await tab.evaluate(
            "[...document.querySelectorAll('[role=img], button, progress:not([aria-hidden])')]"
            ".filter((one) => !one.getAttribute('aria-label')).length"
        ) == 0  # fmt: skip

        image = await tab.screenshot(whole=False)
        assert struct.unpack(">II", image[16:24]) == (width, 900)
        ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(13, 16, 23)" if dark else "rgb(244, 245, 247)")
        assert tab.complaints == []
        assert {address for address in tab.requests if not address.startswith(url)} == set()


async def test_the_page_follows_the_run_to_its_end(tab: Tab) -> None:
    steps, moments = records(8), [now(7)]
    async with watched(lambda: moments[-1], lambda: steps[:-1], refresh_s=0.02) as (url, _):
        await tab.open(url, width=1280)
        await tab.until("document.querySelector('#connection').textContent === 'live'")
        assert await text_of(tab, "#recent td") == "7"
        steps.append(steps[-1])
        await tab.until("document.querySelector('#recent td').textContent === '8'")
        assert not await tab.evaluate("document.querySelector('#alarm').checkVisibility()")
        moments.append(now(8, "stalled", report="nothing has moved for 300 s"))
        await tab.until("document.querySelector('#alarm').checkVisibility()")
        assert await text_of(tab, "#alarm pre") == "nothing has moved for 300 s"

        # By the keyboard alone: past the link to the charts, on to the button. Nothing has scrolled yet:
        # some versions (150) would start from where it did, others (156) from the top.
        for _ in range(2):
            await press(tab, "Tab", 9)
        assert await tab.evaluate("document.activeElement.id") == "theme"
        await press(tab, "Enter", 13, "\r")
        assert await tab.evaluate("document.documentElement.dataset.theme") == "light"

        await hover(tab, "reward")
        assert "step 4" in await text_of(tab, "#chart-reward .readout")
        steps += [msgspec.structs.replace(steps[-1], step=9, time_s=999.0), steps[-1]]
        await tab.until("document.querySelector('#recent td').textContent === '9'")
        assert "step 5" in await text_of(tab, "#chart-reward .readout")  # the chart's present state

        await tab.evaluate("document.querySelector('#chart-entropy .plot').focus()")
        for key, code, step in (
            ("End", 35, 9),
            ("ArrowLeft", 37, 8),
            ("Home", 36, 1),
            ("ArrowRight", 39, 2),
        ):
            await press(tab, key, code)
            assert await text_of(tab, "#chart-entropy .readout") == f"step {step}"
        await press(tab, "Tab", 9)
        await tab.until("!document.querySelector('#chart-entropy .readout')")

        next(task for task in asyncio.all_tasks() if task.get_name() == "page").cancel()
        await tab.until("document.querySelector('#connection').textContent === 'ended'")
        # Nothing says any more that the run continues.
        assert await text_of(tab, "#state") == "ended"
        assert await text_of(tab, "#time") == "· 70 min"
        chips = "[...document.querySelectorAll('main > :not(.tiles) .chip, header .chip')]"
        assert await tab.evaluate(f"{chips}.filter((one) => one.checkVisibility()).map((one) => one.id)") == [
            "state"
        ]
        titles = await tab.evaluate("document.querySelector('main').innerText")
        assert "Where the trajectories are" in titles
        for gone in ("Engines", "Slowest trajectories", "What the run waits for", "The run stands still"):
            assert gone not in titles.split("\n"), gone
        assert tab.complaints == []


async def test_a_run_is_finished_when_it_ends_after_its_last_step(tab: Tab) -> None:
    async with watched(lambda: now(200), lambda: records(8), refresh_s=0.02) as (url, _):
        await tab.open(url, width=1280)
        await tab.until("document.querySelector('#connection').textContent === 'live'")
        assert " left" not in await text_of(tab, "#time")
        next(task for task in asyncio.all_tasks() if task.get_name() == "page").cancel()
        await tab.until("document.querySelector('#state').textContent === 'finished'")
        assert await text_of(tab, "#phase") == ""


async def test_the_slowest_trajectories_wrap_when_the_window_is_narrow(tab: Tab) -> None:
    async with watched(now, lambda: records(8), refresh_s=1.0) as (url, _):
        await tab.open(url, width=390)
        await tab.until(DRAWN)
        rows = await text_of(tab, "#slowest")
        assert "a chunk of engine-1 (14 s)" in rows
        table = "document.querySelector('#slowest').closest('.scroll')"
        assert await tab.evaluate(f"{table}.scrollWidth === {table}.clientWidth")


async def test_labels_of_charts_keep_their_sign_when_figures_are_tiny(tab: Tab) -> None:
    steps = [msgspec.structs.replace(record, ppo_kl=-1.2e-12) for record in records(8)]
    async with watched(now, lambda: steps, refresh_s=1.0) as (url, _):
        await tab.open(url, width=1280)
        await tab.until(DRAWN)
        # The axis ends where the plot begins; a label that is longer would lose its beginning.
        room = await tab.evaluate("document.querySelector('#chart-ppo-kl .u-over').offsetLeft")
        label = await tab.evaluate(
            "(() => { const context = document.createElement('canvas').getContext('2d');"
            "context.font = '11px system-ui, sans-serif'; return context.measureText('-1.2e-12').width })()"
        )
        assert label + 4 <= room
        assert "-1.2e-12" in await text_of(tab, "#chart-ppo-kl .legend")


async def test_tiles_say_in_a_word_whether_a_figure_is_healthy(tab: Tab) -> None:
    steps = records(8)
    steps[-1] = msgspec.structs.replace(steps[-1], ppo_kl=0.3, staleness_max=9)
    async with watched(now, lambda: steps, refresh_s=1.0) as (url, _):
        await tab.open(url, width=1280)
        await tab.until(DRAWN)
        words = await tab.evaluate(
            "[...document.querySelectorAll('.tile')].map((tile) => tile.querySelector('.chip')?.innerText)"
        )
        assert words == ["healthy", "look", "healthy", "wrong", None, "healthy"]


@pytest.mark.parametrize("width", [1280, 390])
async def test_the_report_is_whole_without_a_server(tab: Tab, tmp_path: Path, width: int) -> None:
    folder = write_run_folder(tmp_path / "run", records(120), log=LOG)
    path = write_report(folder)
    await tab.open(path.as_uri(), width=width)
    await tab.until(DRAWN)
    assert await text_of(tab, "#tile-reward") == f"{records(120)[-1].reward_mean:.3g}"
    assert await tab.evaluate("document.documentElement.scrollWidth") == width
    assert await tab.evaluate("document.title") == "calculator-moe · async-rl report"
    assert await tab.evaluate(BLANK) == []
    assert "so far" not in await tab.evaluate("document.body.innerText")
    await hover(tab, "ppo-kl")  # its only script is the one that its policy names
    assert "step 60" in await text_of(tab, "#chart-ppo-kl .readout")
    assert tab.complaints == []
    assert tab.requests == [path.as_uri()]


@pytest.mark.parametrize("dark", [False, True])
async def test_all_text_has_enough_contrast(tab: Tab, tmp_path: Path, dark: bool) -> None:
    steps = records(120)
    async with watched(now, lambda: steps) as (url, _):
        report = write_report(write_run_folder(tmp_path / "run", steps, log=LOG))
        for address in (url, report.as_uri()):
            await tab.open(address, width=1280, dark=dark)
            await tab.until(DRAWN)
            assert await tab.evaluate(CONTRAST) == [], address
