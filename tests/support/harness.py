"""A program for `HarnessLoop` that does what a test wrote down, with the official clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agent_loops.harness import HarnessLoop
from tests.support.scripted_session import make_task
from tests.support.talk import lines, talking

HEAD = """
import asyncio, json, os, subprocess, sys
from pathlib import Path
"""
ASKS = (
    HEAD
    + """
import urllib.request
def ask(*texts, system="", retry=None, model="policy"):
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    if retry is not None:
        headers["x-stainless-retry-count"] = str(retry)
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": model, "messages": messages}).encode(), headers=headers,
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
)


def program(source: str, *arguments: str, **fields: Any) -> dict[str, Any]:
    """Settings of a Python program with `ask(*texts)`, which asks the policy."""
    return {"command": [sys.executable, "-c", ASKS + source, *arguments], **fields}


async def attempt(loop: HarnessLoop, *answers: str, max_branches: int = 0, **task: Any) -> tuple[Any, Any]:
    """Run one attempt; return its bench and the reason of its end."""
    bench, _ = talking(lines(*answers), max_branches=max_branches)
    bench.session.task = given = make_task(**task)
    reason = await loop.run(given, bench.session)
    return bench, reason


def source_of(folder: Path, **files: str) -> str:
    """A source of workspaces with these files; `__` stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)
