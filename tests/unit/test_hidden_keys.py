"""What servers tell of themselves, without their keys."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from async_rl.engines.sglang import hidden_keys
from tests.unit.test_memory_gate import ask

fastapi = pytest.importorskip("fastapi")

SETTINGS = {"api_key": "open", "admin_api_key": 'adm"in', "launch_command": ["--x", "open"], "tp_size": 2}


async def settings() -> dict[str, object]:
    return SETTINGS


async def test_settings_are_told_without_the_keys_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = fastapi.FastAPI()
    for path in ("/server_info", "/get_server_info", "/generate"):
        app.post(path)(settings)
    monkeypatch.setitem(
        hidden_keys.sys.modules,
        "sglang.srt.entrypoints",
        SimpleNamespace(http_server=SimpleNamespace(app=app)),
    )
    hidden_keys.install(SimpleNamespace(api_key="open", admin_api_key='adm"in'))
    for path in ("/server_info", "/get_server_info"):
        told = await ask(app, path)
        assert json.loads(told.body) == SETTINGS | {
            "api_key": "***",
            "admin_api_key": "***",
            "launch_command": ["--x", "***"],
        }
        assert int(told.headers["content-length"]) == len(told.body)
    assert json.loads((await ask(app, "/generate")).body) == SETTINGS


async def test_a_server_without_keys_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    app = fastapi.FastAPI()
    app.post("/server_info")(settings)
    monkeypatch.setitem(
        hidden_keys.sys.modules,
        "sglang.srt.entrypoints",
        SimpleNamespace(http_server=SimpleNamespace(app=app)),
    )
    hidden_keys.install(SimpleNamespace(api_key=None, admin_api_key=None))
    assert json.loads((await ask(app, "/server_info")).body) == SETTINGS
