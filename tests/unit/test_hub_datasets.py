"""Folders and names on the Hub as datasets, read by the package `datasets` without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import DataConfig, DatasetConfig, load_config
from async_rl.data import hub_datasets
from async_rl.data.dataset import load_run_tasks, load_tasks
from async_rl.data.example_files import dataset_name, read_examples
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.types import Task
from tests.support.run_config import write_run

ROWS = [{"question": f"{n} + 1?", "answer": {"final": str(n + 1), "unit": None}} for n in range(5)]
KEYS: Any = {"messages": "question", "answer": "answer.final"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub of this test's own, and no network."""
    home = tmp_path_factory.mktemp("hub")
    try:
        import datasets
        import huggingface_hub.constants as constants
    except ImportError:
        return home
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    return home


def tasks_of(path: str) -> list[Task]:
    return list(load_tasks(DataConfig(path=path, keys=KEYS)))


def numbers(tasks: list[Task]) -> list[str]:
    return [task.messages[0]["content"].split()[0] for task in tasks]


def save(folder: Path, *splits: str) -> None:
    """Save all rows with `datasets`, or a row for each split."""
    import datasets

    if not splits:
        datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))
        return
    parts = {split: datasets.Dataset.from_list([row]) for split, row in zip(splits, ROWS, strict=False)}
    datasets.DatasetDict(parts).save_to_disk(str(folder))


def in_cache(cache: Path) -> None:
    """Put a dataset with two configs into the cache, as reading it from the Hub does."""
    import datasets

    folder = cache / "sums"
    folder.mkdir()
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: main, data_files: [{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]}\n"
        "- {config_name: other, data_files: [{split: train, path: b.jsonl}]}\n---\n"
    )
    for name, rows in (("a", ROWS[:3]), ("b", ROWS[3:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for config in ("main", "other"):
        datasets.load_dataset(str(folder), config)
        (made,) = filter(Path.is_dir, (cache / "datasets" / "sums").glob(f"{config}/*/*"))
        shutil.copytree(made, cache / "datasets" / "someone___sums" / config / "0.0.0" / ("0" * 40))


def test_the_extra_is_named_when_the_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_datasets.importlib.util, "find_spec", lambda name: None)
    for path in ("hub:openai/gsm8k", str(tmp_path)):
        with pytest.raises(EnvironmentNotReady, match=r"data\.path is .*pip install -e '\.\[datasets\]'"):
            tasks_of(path)


def test_a_dataset_of_the_hub_has_the_name_behind_its_owner() -> None:
    assert dataset_name("hub:openai/gsm8k?config=main&split=test") == "gsm8k"


@pytest.mark.needs("datasets")
def test_a_saved_dataset_is_read_in_its_order(tmp_path: Path) -> None:
    save(tmp_path / "sums")
    tasks = tasks_of(str(tmp_path / "sums"))
    assert numbers(tasks) == ["0", "1", "2", "3", "4"]
    assert [task.answer for task in tasks] == ["1", "2", "3", "4", "5"]
    assert dataset_name(str(tmp_path / "sums")) == "sums"
    where, example = next(read_examples(str(tmp_path / "sums"), "data.path"))
    assert where.endswith("sums row 1")
    assert example == {"question": "0 + 1?", "answer": {"final": "1"}}  # its null stands for no key


@pytest.mark.needs("datasets")
def test_a_saved_split_is_chosen(tmp_path: Path) -> None:
    save(tmp_path / "one", "test")
    save(tmp_path / "two", "train", "test")
    assert numbers(tasks_of(f"{tmp_path}/one")) == ["0"]
    assert numbers(tasks_of(f"{tmp_path}/two")) == ["0"]
    assert numbers(tasks_of(f"{tmp_path}/two?split=test")) == ["1"]
    with pytest.raises(ConfigError, match="no split 'dev'; expected split=train or split=test"):
        tasks_of(f"{tmp_path}/two?split=dev")
    save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="leave split out"):
        tasks_of(f"{tmp_path}/plain?split=train")


@pytest.mark.needs("datasets")
def test_a_folder_of_files_is_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    for split, rows in (("train", ROWS[:2]), ("test", ROWS[2:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert numbers(tasks_of(str(folder))) == ["0", "1"]
    assert numbers(tasks_of(f"{folder}?split=test")) == ["2", "3", "4"]


@pytest.mark.needs("datasets")
def test_config_and_split_of_a_dataset_of_the_hub_are_chosen(cache: Path) -> None:
    in_cache(cache)
    assert numbers(tasks_of("hub:someone/sums?config=main")) == ["0", "1", "2"]
    assert numbers(tasks_of("hub:someone/sums?config=main&split=test")) == ["3", "4"]
    assert numbers(tasks_of("hub:someone/sums?config=main&split=train[1:]")) == ["1", "2"]
    assert numbers(tasks_of("hub:someone/sums?config=other")) == ["3", "4"]
    mixed = load_tasks(DataConfig(datasets=[DatasetConfig(path="hub:someone/sums?config=other", keys=KEYS)]))
    assert mixed[0].task_id == "sums/row-0"
    with pytest.raises(ConfigError, match='Unknown split "dev"'):
        tasks_of("hub:someone/sums?config=main&split=dev")


@pytest.mark.needs("datasets")
def test_one_error_says_that_the_hub_cannot_be_reached(cache: Path) -> None:
    with pytest.raises(
        EnvironmentNotReady, match=r"'hub:someone/sums' is not in the cache .*cannot be reached"
    ):
        tasks_of("hub:someone/sums")


@pytest.mark.needs("datasets")
def test_a_folder_that_changed_is_read_anew(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path), [f"data.path={tmp_path / 'sums'}", f"data.keys={json.dumps(KEYS)}"]
    )
    (tmp_path / "sums").mkdir()
    file = tmp_path / "sums" / "train.jsonl"
    for rows in (ROWS[:2], ROWS):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert len(load_run_tasks(config)) == len(rows)
