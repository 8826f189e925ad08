"""The datasets: rows of jsonl and parquet files as `Task`s.

```
 file ──rows──► schema ──► Task ──► its prompt in tokens ──► Dataset ─┐
 (streamed)     (schemas)           refuse | filter | keep            ├─► TaskSet ──► Order (order)
                                                             Dataset ─┘
```

Bad rows are named by file and line, up to ten of them at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, overload

import msgspec

from async_rl.config import Config, DataConfig, DatasetConfig, SourceConfig
from async_rl.data.chat_format import load_chat_format
from async_rl.data.order import DataOrder, Mixture, TaskOrder
from async_rl.data.schemas import Schema, chosen_schema, detect, keys_of, to_task
from async_rl.errors import ConfigError
from async_rl.types import Task

_MAX_NAMED: Final = 10
"""So many bad rows of a file are named; the others are counted."""


_LONG_REMEDY: Final = (
    "set data.long_prompts=filter to leave such rows out, or raise data.max_prompt_tokens or "
    "rollout.max_context_tokens"
)
_ADDED_TOKENS: Final = 64
_NUM_COUNTED: Final = 64
"""The longest prompt in tokens is looked for among so many of the longest texts."""


class PromptRule(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of prompts that are too long."""

    render: Callable[[Task], str]
    """A task's prompt as text; raises ConfigError where there is no way."""
    count: Callable[[Task], int]
    """The tokens of it."""
    limit: int
    policy: Literal["refuse", "filter"]


def prompt_rule(config: Config) -> PromptRule | None:
    """As configured; None where nobody shall look.

    Raises:
        ConfigError: The model has no usable tokenizer.
    """
    if config.data.long_prompts == "keep":
        return None
    chat = load_chat_format(config.model.path)
    return PromptRule(
        render=lambda task: chat.prompt_text(task.messages, task.tools),
        count=lambda task: len(chat.prompt_ids(task.messages, task.tools)),
        limit=config.data.max_prompt_tokens or config.rollout.max_context_tokens - 1,
        policy=config.data.long_prompts,
    )


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one file."""

    name: str
    path: str
    schema: Schema
    detected: bool
    """Whether the schema is that of the first row, and not the config's word."""
    tasks: list[Task]
    weight: float | None = None
    num_filtered: int = 0
    """Rows that were left out because their prompts are too long."""
    longest_prompt: int | None = None
    """Tokens, of those that were kept: of the longest texts among them. None where nobody looked."""


class TaskSet(Sequence[Task]):
    """The tasks of all datasets of a run, one dataset after the other.

    Example:
        >>> tasks = load_tasks(config.data)
        >>> order = tasks.order(config.run.seed, config.data.shuffle)
        >>> tasks[order.task_at(0)]  # the first one that is given out
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = tuple(datasets)
        self._tasks = list(chain.from_iterable(dataset.tasks for dataset in datasets))

    def order(self, seed: int, shuffle: bool) -> Mixture:
        """In which order they are taken."""
        weights = [dataset.weight for dataset in self.datasets]
        set_weights = [weight for weight in weights if weight is not None]
        return Mixture([len(dataset.tasks) for dataset in self.datasets], set_weights or None, seed, shuffle)

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        return self._tasks[index]


def order_of(tasks: Sequence[Task], seed: int, shuffle: bool) -> DataOrder:
    """In which order tasks are taken; any sequence but a `TaskSet` is one dataset."""
    if isinstance(tasks, TaskSet):
        return tasks.order(seed, shuffle)
    return TaskOrder(len(tasks), seed, shuffle)


def load_run_tasks(config: Config) -> TaskSet:
    """Read the tasks of a run and apply its rule for long prompts.

    The checks before a run and the run itself need the same: the last result is kept.

    Raises:
        ConfigError: See `load_tasks`.
    """
    sources = config.data.datasets or [DatasetConfig(path=config.data.path or "")]
    files = [Path(source.path).resolve() for source in sources]
    states = [file.stat() for file in files if file.is_file()]
    seen = (*map(str, files), *((state.st_mtime_ns, state.st_size) for state in states))
    return _load_once(msgspec.json.encode(config), seen)


@lru_cache(maxsize=1)
def _load_once(config: bytes, _: Hashable) -> TaskSet:
    decoded = msgspec.json.decode(config, type=Config)
    return load_tasks(decoded.data, prompt_rule(decoded))


def load_tasks(config: DataConfig, prompts: PromptRule | None = None) -> TaskSet:
    """Read all tasks to train on.

    Args:
        config: Files and keys.
        prompts: What becomes of long ones; None does not look.

    Raises:
        ConfigError: A file is missing, empty or of another kind, two datasets have one name, or rows are
            malformed or repeat an id; the message names up to ten of them by file and line (parquet: row).
    """
    if not config.datasets:
        source = DatasetConfig(path=config.path or "")
        return TaskSet([_load(source, config, "data.path", prompts)])
    datasets = _load_all(config.datasets, config, "data.datasets", prompts)
    return TaskSet([_renamed(dataset) for dataset in datasets])


def load_validation(config: DataConfig, prompts: PromptRule | None = None) -> list[Dataset]:
    """Read the validation sets; see `load_tasks`."""
    return _load_all(config.validation, config, "data.validation", prompts)


def _load_all(
    sources: Sequence[SourceConfig], config: DataConfig, place: str, prompts: PromptRule | None
) -> list[Dataset]:
    datasets: dict[str, Dataset] = {}
    for index, source in enumerate(sources):
        dataset = _load(source, config, f"{place}[{index}].path", prompts)
        if (other := datasets.setdefault(dataset.name, dataset)) is not dataset:
            raise ConfigError(
                f"{place}: {other.path} and {dataset.path} are both called {dataset.name!r}; set a name"
            )
    return list(datasets.values())


def _renamed(dataset: Dataset) -> Dataset:
    """The same with ids that cannot meet those of another dataset."""
    tasks = [
        msgspec.structs.replace(task, task_id=f"{dataset.name}/{task.task_id}") for task in dataset.tasks
    ]
    return msgspec.structs.replace(dataset, tasks=tasks)


def _load(source: SourceConfig, config: DataConfig, place: str, prompts: PromptRule | None) -> Dataset:
    path = Path(source.path)
    rows = rows_of(path, place)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{place}: {str(path)!r} has no rows; expected at least one task")
    named = chosen_schema(source, config)
    schema = named or detect(first[1])
    keys = keys_of(schema, source, config)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    bad = Complaints(path, "bad rows")
    long = Complaints(path, "rows with prompts that are too long", _LONG_REMEDY)
    gauge = None if prompts is None else _PromptGauge(prompts)
    for number, (where, row) in enumerate(chain([first], rows)):
        try:
            if isinstance(row, ConfigError):
                raise row
            task = to_task(row, number, where, keys)
            if task.task_id in seen:
                raise ConfigError(
                    f"{where}: the {keys.id!r} {task.task_id!r} was used before, at {seen[task.task_id]}; "
                    "expected a different one in each row"
                )
            seen[task.task_id] = where
            num_tokens = 0 if gauge is None else gauge.look(task)
        except ConfigError as error:
            text = str(error)
            bad.add(text if text.startswith(where) else f"{where}: {text}")
            continue
        if prompts is not None and num_tokens > prompts.limit:
            long.add(f"{where}: the prompt has {num_tokens} tokens, and {prompts.limit} are allowed")
            continue
        tasks.append(task)
    bad.check()
    if prompts is not None and prompts.policy == "refuse":
        long.check()
    if not tasks:
        assert prompts is not None, "only prompts that are too long are left out"
        raise ConfigError(
            f"{place}: all {long.count} rows of {str(path)!r} have prompts of more than {prompts.limit} "
            "tokens; raise data.max_prompt_tokens or rollout.max_context_tokens"
        )
    return Dataset(
        name=source.name or path.stem,
        path=str(path),
        schema=schema,
        detected=named is None,
        tasks=tasks,
        weight=source.weight if isinstance(source, DatasetConfig) else None,
        num_filtered=long.count,
        longest_prompt=None if gauge is None else gauge.longest(),
    )


class _PromptGauge:
    """Measures prompts, and tokenises no more of them than it must: that costs ten times the rendering."""

    def __init__(self, rule: PromptRule) -> None:
        self._rule = rule
        self._longest = 0
        self._texts: list[tuple[int, int, Task]] = []  # a heap of the longest that were not tokenised
        self._seen = 0

    def look(self, task: Task) -> int:
        """Tokens of a prompt where they may be over the limit; 0 where they cannot be.

        A token is at least a character of ASCII, but for a few that some tokenizers put before words.
        """
        text, rule = self._rule.render(task), self._rule
        self._seen += 1
        if not (text.isascii() and len(text) + _ADDED_TOKENS <= rule.limit):
            num_tokens = rule.count(task)
            self._longest = max(self._longest, num_tokens if num_tokens <= rule.limit else 0)
            return num_tokens
        keep = heapq.heappush if len(self._texts) < _NUM_COUNTED else heapq.heappushpop
        keep(self._texts, (len(text), self._seen, task))
        return 0

    def longest(self) -> int:
        """Tokens of the longest prompt that is kept."""
        return max([self._longest, *(self._rule.count(task) for _, _, task in self._texts)])


class Complaints:
    """What is wrong with the rows of a file: the first ones, and how many there are."""

    def __init__(self, path: Path, what: str, remedy: str = "") -> None:
        self._path, self._what, self._remedy = path, what, remedy
        self._named: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        """One more."""
        self.count += 1
        if self.count <= _MAX_NAMED:
            self._named.append(text)

    def check(self) -> None:
        """Raise a ConfigError where there are any."""
        if not self.count:
            return
        if self.count == 1:
            raise ConfigError(self._named[0] + (f"; {self._remedy}" if self._remedy else ""))
        more = self.count - len(self._named)
        rest = [f"and {more} more"] if more else []
        head = f"{self._path} has {self.count} {self._what}{f'; {self._remedy}' if self._remedy else ''}:"
        listed = "\n  ".join([head, *self._named, *rest])
        raise ConfigError(listed)


def rows_of(path: Path, place: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file one after the other, each with its place in it.

    Args:
        path: Of the file.
        place: The config's key that names it.

    Returns:
        Pairs of file with line (parquet: row), and the row, or the `ConfigError` that it is none.

    Raises:
        ConfigError: The file is missing or of another kind.
    """
    if not path.is_file():
        raise ConfigError(f"{place}: there is no file {str(path)!r} (looked from {Path.cwd()})")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{place}: {str(path)!r} ends in {path.suffix!r}; expected .jsonl or .parquet")
    return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path, place)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line with its place; one that cannot be read as the error that it is."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                row = ConfigError(f"{where}: not a JSON object: {error}")
            except UnicodeDecodeError as error:
                row = ConfigError(f"{where}: not UTF-8: {error}")
            yield where, row


def _parquet_rows(path: Path, place: str) -> Iterator[tuple[str, Any]]:
    """Each row with its place, one batch of a row group in memory at a time."""
    import pyarrow as pa  # takes half a second, and most datasets are jsonl
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pa.ArrowException as error:
        raise ConfigError(f"{place}: {str(path)!r} is not a readable parquet file: {error}") from error
