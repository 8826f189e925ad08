"""The dataset: rows of a jsonl or parquet file as `Task`s, and the order in which they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.config import DataConfig
from async_rl.errors import ConfigError
from async_rl.types import Int64Array, Task

PROMPT_KEY = "prompt"
"""Where a row without messages may have a plain prompt string."""


def load_tasks(config: DataConfig) -> list[Task]:
    """Read all tasks.

    A row holds chat messages (or a prompt string, which becomes one user message), optionally an answer, an
    id and a dotted path of its own agent loop; every other key becomes the task's metadata.

    Raises:
        ConfigError: The file is missing, empty, of another kind, or a row is malformed or repeats an id; the
            message names file and line (parquet: row), what was found and what was expected.
    """
    path = Path(config.path)
    if not path.is_file():
        raise ConfigError(f"data.path: there is no file {str(path)!r} (looked from {Path.cwd()})")
    if path.suffix == ".jsonl":
        rows = _jsonl_rows(path)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        raise ConfigError(f"data.path: {str(path)!r} ends in {path.suffix!r}; expected .jsonl or .parquet")
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        task = _task(row, len(tasks), where, config)
        if task.task_id in seen:
            raise ConfigError(
                f"{where}: the {config.id_key!r} {task.task_id!r} was used before, at {seen[task.task_id]}; "
                "expected a different one in each row"
            )
        seen[task.task_id] = where
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"data.path: {str(path)!r} has no rows; expected at least one task")
    return tasks


class TaskOrder:
    """Which task stands at which position of an endless, epoch by epoch shuffled stream.

    Pure in (seed, position), so that a resumed run needs no more than its position.
    """

    def __init__(self, num_tasks: int, seed: int, shuffle: bool) -> None:
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; expected at least 1")
        self.num_tasks = num_tasks
        self._seed = seed
        self._shuffle = shuffle
        # Two, because a retried prompt may reach back over an epoch's edge.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def epoch_at(self, position: int) -> int:
        """How many times all tasks have gone by before this position."""
        return position // self.num_tasks

    def task_at(self, position: int) -> int:
        """Index of the task at a position."""
        epoch, offset = divmod(position, self.num_tasks)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permute(self, epoch: int) -> Int64Array:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_tasks)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{where}: not a JSON object: {error}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8: {error}") from error
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa  # takes half a second, and most datasets are jsonl
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pa.ArrowException as error:
        raise ConfigError(f"data.path: {str(path)!r} is not a readable parquet file: {error}") from error


def _task(row: Any, position: int, where: str, config: DataConfig) -> Task:
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: the row is {_kind(row)}; expected an object with {config.messages_key!r}"
        )
    key = config.messages_key if row.get(config.messages_key) is not None else PROMPT_KEY
    task_id = row.get(config.id_key)
    if not (task_id is None or (isinstance(task_id, str | int) and not isinstance(task_id, bool))):
        raise ConfigError(f"{where}: {config.id_key!r} is {_kind(task_id)}; expected a string or an integer")
    agent_loop = row.get(config.agent_loop_key)
    if not (agent_loop is None or isinstance(agent_loop, str)):
        raise ConfigError(
            f"{where}: {config.agent_loop_key!r} is {_kind(agent_loop)}; expected `module:Class` or null"
        )
    taken = {key, config.messages_key, config.answer_key, config.id_key, config.agent_loop_key}
    return Task(
        task_id=f"row-{position}" if task_id is None else str(task_id),
        messages=_messages(row.get(key), where, config.messages_key),
        answer=row.get(config.answer_key),
        metadata={name: value for name, value in row.items() if name not in taken},
        agent_loop=agent_loop,
    )


def _messages(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        found = "missing" if value is None else "empty" if value in ("", []) else _kind(value)
        raise ConfigError(f"{where}: {key!r} is {found}; expected a list of chat messages or a prompt string")
    for index, message in enumerate(value):
        at = f"{where}: {key!r}[{index}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{at} is {_kind(message)}; expected an object with 'role' and 'content'")
        if not (isinstance(message.get("role"), str) and message["role"]):
            raise ConfigError(f"{at} has no 'role'; expected system, user, assistant or tool")
        content = message.get("content")
        if not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            raise ConfigError(f"{at}: 'content' is {_kind(content)}; expected a string")
    # Parquet gives every message all keys that any message has.
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def _kind(value: Any) -> str:
    """A JSON value's kind, for a message."""
    if value is None:
        return "missing"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"{type(value).__name__} {value!r:.40}")
