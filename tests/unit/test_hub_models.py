"""Models on the Hugging Face Hub: their folders replace their names, here from a cache without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from async_rl.config import load_config
from async_rl.data.chat_format import load_chat_format
from async_rl.engines.model_facts import load_facts
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.run.preflight import check_config
from tests.support.run_config import write_run

REVISION = "0123456789" * 4


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config without a model, and a cache of the Hub that has the model, by two names."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = write_run(tmp_path)
    repository = tmp_path / "cache" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "v2"):
        (repository / "refs" / name).write_text(REVISION)
    (repository / "snapshots").mkdir()
    (tmp_path / "model").rename(repository / "snapshots" / REVISION)
    return path


def test_a_model_of_the_hub_is_a_folder_for_all_that_read_it(config: Path) -> None:
    found = load_config(config, ["model.path=hub:someone/tiny", "models={judge: {path: 'hub:someone/tiny'}}"])
    folder = str(config.parent / "cache" / "models--someone--tiny" / "snapshots" / REVISION)
    assert (found.model.path, found.models["judge"].path) == (folder, folder)
    assert any(line.startswith("model: 3 of 3 layers") for line in check_config(found))


def test_a_model_of_the_hub_has_the_revision_that_is_named(config: Path) -> None:
    (config.parent / "cache" / "models--someone--tiny" / "refs" / "main").unlink()
    assert load_config(config, ["model.path=hub:someone/tiny?revision=v2"]).model.path.endswith(REVISION)
    with pytest.raises(EnvironmentNotReady, match=r"hub:someone/tiny"):
        load_config(config, ["model.path=hub:someone/tiny"])


@pytest.mark.parametrize("whole", [True, False])
def test_only_files_that_are_read_are_downloaded(
    config: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or "folder"
    )
    load_config(config, ["model.path=hub:someone/tiny"], download_weights=whole)
    assert ("*.safetensors" in asked["allow_patterns"]) == whole
    assert "*.bin" not in asked["allow_patterns"]


def test_one_error_says_that_the_hub_cannot_be_reached(config: Path) -> None:
    with pytest.raises(
        EnvironmentNotReady, match=r"^models\.judge\.path: .*'hub:someone/large'.*hf download"
    ):
        load_config(config, ["model.path=hub:someone/tiny", "models={judge: {path: 'hub:someone/large'}}"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hub:a/b/c", "expected hub:OWNER/NAME"),
        ("hub:a--b", "cannot be downloaded: .*a--b"),
        ("hub:a/b?split=train", r"'split=train' is no option of it; expected revision=…"),
    ],
)
def test_config_error_when_a_name_cannot_be_one_of_the_hub(config: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config, [f"model.path={path}"])


def test_the_hubs_own_words_are_passed_on(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def refuse(*_: Any, **__: Any) -> str:
        response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
        raise HfHubHTTPError("\nAccess to model someone/tiny is restricted.\nMore.", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        ConfigError, match=r"^model\.path: .*cannot be downloaded: Access to model someone/tiny"
    ):
        load_config(config, ["model.path=hub:someone/tiny"])


@pytest.mark.parametrize("read", [load_facts, load_chat_format])
def test_the_spelling_is_named_when_a_folder_is_missing_that_may_be_on_the_hub(read: Any) -> None:
    with pytest.raises(ConfigError, match=r"write hub:Qwen/Qwen3-0.6B"):
        read("Qwen/Qwen3-0.6B")
