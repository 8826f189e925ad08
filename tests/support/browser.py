"""Drives a headless Chromium by its DevTools protocol over a websocket, without a driver or further package.

It records a page's requests and console messages and takes screenshots.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers, and the page is trusted
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
)

_LINE = re.compile(rb"DevTools listening on (ws://\S+)")


class Tab:
    """A tab with one page."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, numbers: Iterator[int], session_id: str
    ) -> None:
        self._socket = socket
        self._numbers = numbers
        self._session_id = session_id
        self._loaded = False
        self.requests: list[str] = []
        """The addresses that the page requested."""
        self.complaints: list[str] = []
        """Errors and warnings on the console, and exceptions of scripts."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that arrive meanwhile are recorded."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, "sessionId": self._session_id}
        await self._socket.send_json(message)
        while True:
            answer = json.loads((await self._socket.receive()).data)
            self._keep(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true in the page."""
        return await self.evaluate(
            "new Promise((done) => { const look = () => { const value = (" + condition + ");"
            "value ? done(value) : requestAnimationFrame(look) }; look() })"
        )

    async def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open an address in a window of the given size, as a phone if narrow; return when it has loaded."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        await self.send("Page.navigate", url=url)
        while not self._loaded:
            self._keep(json.loads((await self._socket.receive()).data))

    async def screenshot(self, *, whole: bool = True) -> bytes:
        """Return the whole page or the visible part as PNG."""
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def _keep(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session_id:
            return
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))


class Browser:
    """A browser that runs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def open_tab(self) -> AsyncIterator[Tab]:
        """Open an empty tab during the block."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.send("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(self._socket, self._numbers, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            await tab.send(f"{domain}.enable")
        yield tab
        await self.send("Target.closeTarget", targetId=target)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method that concerns no tab."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (answer := json.loads((await self._socket.receive()).data)).get("id") != number:
            pass
        return answer["result"]


@asynccontextmanager
async def browser(chromium: str, profile: Path) -> AsyncIterator[Browser]:
    """Run a browser during the block.

    Args:
        chromium: The path of the program.
        profile: A folder for its profile.
    """
    process = await asyncio.create_subprocess_exec(
        chromium,
        *FLAGS,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        url = ""
        async for line in process.stderr:
            if found := _LINE.search(line):
                url = found[1].decode()
                break
        assert url, "chromium ended without an address"
        async with aiohttp.ClientSession() as client, client.ws_connect(url, max_msg_size=0) as socket:
            started = Browser(socket)
            yield started
            await started.send("Browser.close")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
