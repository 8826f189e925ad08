"""The datasets: their examples as `Task`s.

```
 file ──examples──► schema ──► Task ──► its prompt in tokens ──► Dataset ─┐
 (example_files)   (schemas)            refuse | filter | keep            ├─► TaskSet ──► DataOrder (order)
                                                                 Dataset ─┘
```

Errors name malformed examples by file and line, up to ten at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, Literal, overload

import msgspec

from async_rl.config import Config, DataConfig, DatasetConfig, SourceConfig
from async_rl.data.chat_format import load_chat_format
from async_rl.data.example_files import dataset_name, dataset_state, read_examples
from async_rl.data.order import DataOrder, Mixture, TaskOrder
from async_rl.data.schemas import (
    Schema,
    chosen_schema,
    configured_keys,
    detect_schema,
    has_key,
    keys_of,
    name_keys,
    to_task,
)
from async_rl.errors import ConfigError
from async_rl.observability.evaluation_record import EVERYTHING
from async_rl.types import Task

_MAX_NAMED: Final = 10
"""An error names this many examples of a file, and counts the others."""

_LONG_REMEDY: Final = (
    "set data.long_prompts=filter to leave such examples out, or raise data.max_prompt_tokens or "
    "rollout.max_context_tokens"
)
_ADDED_TOKENS: Final = 64
_NUM_COUNTED: Final = 64
"""The longest prompt in tokens is determined among this many of the longest texts."""


class PromptRule(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are measured, and what happens to those that are too long."""

    render: Callable[[Task], str]
    """Renders a task's prompt as text; raises ConfigError if the chat template cannot."""
    count: Callable[[Task], int]
    """Counts the tokens of a task's prompt."""
    limit: int
    policy: Literal["refuse", "filter"]


def prompt_rule(config: Config) -> PromptRule | None:
    """Return the rule of a config; None if prompts are not measured.

    Raises:
        ConfigError: The model has no usable tokenizer.
    """
    if config.data.long_prompts == "keep":
        return None
    chat = load_chat_format(config.model.path, config.model.trusted_roles)
    return PromptRule(
        render=lambda task: chat.prompt_text(task.messages, task.tools),
        count=lambda task: len(chat.prompt_ids(task.messages, task.tools)),
        limit=config.data.max_prompt_tokens or config.rollout.max_context_tokens - 1,
        policy=config.data.long_prompts,
    )


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one file, or of one dataset of the Hub."""

    name: str
    path: str
    schema: Schema
    detected: bool
    """Whether the schema was detected from the first example, not set in the config."""
    tasks: list[Task]
    weight: float | None = None
    num_filtered: int = 0
    """Examples that were left out because their prompts are too long."""
    longest_prompt: int | None = None
    """Tokens of the longest kept prompt, among the longest texts; None if prompts were not measured."""
    absent_keys: tuple[str, ...] = ()
    """A sentence for each key that is set, and for that of answers, if no example has it."""


class TaskSet(Sequence[Task]):
    """The tasks of all datasets of a run, one dataset after the other."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = tuple(datasets)
        self._tasks = list(chain.from_iterable(dataset.tasks for dataset in datasets))

    def order(self, seed: int, shuffle: bool) -> Mixture:
        """Return the order in which tasks are dispatched."""
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
    """Return the order of tasks; any sequence other than a `TaskSet` is one dataset."""
    if isinstance(tasks, TaskSet):
        return tasks.order(seed, shuffle)
    return TaskOrder(len(tasks), seed, shuffle)


def load_run_tasks(config: Config) -> TaskSet:
    """Read the tasks of a run and apply its rule for long prompts.

    The last result is cached, because the checks before a run and the run itself need the same.

    Raises:
        ConfigError: As `load_tasks`.
    """
    sources = config.data.datasets or [DatasetConfig(path=config.data.path or "")]
    return _load_once(msgspec.json.encode(config), tuple(dataset_state(source.path) for source in sources))


@lru_cache(maxsize=1)
def _load_once(config: bytes, _: Hashable) -> TaskSet:
    decoded = msgspec.json.decode(config, type=Config)
    return load_tasks(decoded.data, prompt_rule(decoded))


def load_tasks(config: DataConfig, prompts: PromptRule | None = None) -> TaskSet:
    """Read all training tasks.

    Args:
        config: Files and keys.
        prompts: The rule for long prompts; None does not measure them.

    Raises:
        ConfigError: A dataset is missing, empty or of another kind, two datasets have one name, or examples
            are malformed or repeat an id; the message names up to ten of them by file and line, or row. No
            example has the answer at the key that the config sets.
        EnvironmentNotReady: As `read_examples`.
    """
    if not config.datasets:
        source = DatasetConfig(path=config.path or "")
        return TaskSet([_load_dataset(source, config, "data.path", prompts)])
    datasets = _load_all(config.datasets, config, "data.datasets", prompts)
    return TaskSet([_with_prefixed_ids(dataset) for dataset in datasets])


def load_validation(config: DataConfig, prompts: PromptRule | None = None) -> list[Dataset]:
    """Read the validation sets, in the same way as `load_tasks`."""
    datasets = _load_all(config.validation, config, "data.validation", prompts)
    for dataset in datasets:
        if dataset.name == EVERYTHING:
            raise ConfigError(
                f"data.validation: {dataset.path} is called {EVERYTHING!r}, as are the scores of all sets "
                "together; set a name"
            )
    return datasets


def _load_all(
    sources: Sequence[SourceConfig], config: DataConfig, place: str, prompts: PromptRule | None
) -> list[Dataset]:
    datasets: dict[str, Dataset] = {}
    for index, source in enumerate(sources):
        dataset = _load_dataset(source, config, f"{place}[{index}].path", prompts)
        if (other := datasets.setdefault(dataset.name, dataset)) is not dataset:
            raise ConfigError(
                f"{place}: {other.path} and {dataset.path} are both called {dataset.name!r}; set a name"
            )
    return list(datasets.values())


def _with_prefixed_ids(dataset: Dataset) -> Dataset:
    """Return the dataset with task ids that are unique among all datasets."""
    tasks = [
        msgspec.structs.replace(task, task_id=f"{dataset.name}/{task.task_id}") for task in dataset.tasks
    ]
    return msgspec.structs.replace(dataset, tasks=tasks)


def _load_dataset(
    source: SourceConfig, config: DataConfig, place: str, prompts: PromptRule | None
) -> Dataset:
    path = source.path
    examples = read_examples(path, place)
    first = next(examples, None)
    if first is None:
        raise ConfigError(f"{place}: {path!r} has no examples; expected at least one task")
    named = chosen_schema(source, config)
    schema = named or detect_schema(first[1])
    keys = keys_of(schema, source, config)
    configured = configured_keys(source, config)
    absent = {"answer": keys.answer} | configured  # as long as no example has them
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    bad = ExampleErrors(path, "malformed examples")
    long = ExampleErrors(path, "examples with prompts that are too long", _LONG_REMEDY)
    gauge = None if prompts is None else _PromptGauge(prompts)
    for number, (where, example) in enumerate(chain([first], examples)):
        try:
            if isinstance(example, ConfigError):
                raise example
            task = to_task(example, number, where, keys)
            if absent:
                absent = {name: key for name, key in absent.items() if not has_key(example, key)}
            if task.task_id in seen:
                raise ConfigError(
                    f"{where}: the {keys.id!r} {task.task_id!r} was used before, at {seen[task.task_id]}; "
                    "expected a different one in each example"
                )
            seen[task.task_id] = where
            num_tokens = 0 if gauge is None else gauge.count_tokens(task)
        except (ConfigError, RecursionError) as error:
            text = str(error) if isinstance(error, ConfigError) else "the example is nested too deeply"
            bad.add_error(text if text.startswith(where) else f"{where}: {text}")
            continue
        if prompts is not None and num_tokens > prompts.limit:
            long.add_error(f"{where}: the prompt has {num_tokens} tokens, and {prompts.limit} are allowed")
            continue
        tasks.append(task)
    bad.raise_if_any()
    absent_keys = tuple(
        f"no example has the key {key!r} (data.keys.{name}); the keys of the first one are "
        f"{name_keys(first[1])}"
        for name, key in absent.items()
    )
    if "answer" in absent and "answer" in configured:
        raise ConfigError(f"{path}: {absent_keys[0]}")
    if prompts is not None and prompts.policy == "refuse":
        long.raise_if_any()
    if not tasks:
        assert prompts is not None, "only prompts that are too long are left out"
        raise ConfigError(
            f"{place}: all {long.count} examples of {path!r} have prompts of more than {prompts.limit} "
            "tokens; raise data.max_prompt_tokens or rollout.max_context_tokens"
        )
    return Dataset(
        name=source.name or dataset_name(path),
        path=path,
        schema=schema,
        detected=named is None,
        tasks=tasks,
        weight=source.weight if isinstance(source, DatasetConfig) else None,
        num_filtered=long.count,
        longest_prompt=None if gauge is None else gauge.longest(),
        absent_keys=absent_keys,
    )


class _PromptGauge:
    """Measures prompts, and tokenises as few as possible: tokenising costs ten times the rendering."""

    def __init__(self, rule: PromptRule) -> None:
        self._rule = rule
        self._longest = 0
        self._texts: list[tuple[int, int, Task]] = []  # a heap of the longest texts that were not tokenised
        self._seen = 0

    def count_tokens(self, task: Task) -> int:
        """Return the tokens of a prompt if they may exceed the limit; 0 if they cannot.

        A token is at least one ASCII character, except for a few that some tokenizers put before words.
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
        """Return the tokens of the longest prompt that is kept."""
        return max([self._longest, *(self._rule.count(task) for _, _, task in self._texts)])


class ExampleErrors:
    """Collects the errors of a file's examples: the text of the first ones, and how many there are."""

    def __init__(self, path: str, what: str, remedy: str = "") -> None:
        self._path, self._what, self._remedy = path, what, remedy
        self._named: list[str] = []
        self.count = 0

    def add_error(self, text: str) -> None:
        """Add the error of one example."""
        self.count += 1
        if self.count <= _MAX_NAMED:
            self._named.append(text)

    def raise_if_any(self) -> None:
        """Raise a ConfigError if there are errors."""
        if not self.count:
            return
        if self.count == 1:
            raise ConfigError(self._named[0] + (f"; {self._remedy}" if self._remedy else ""))
        more = self.count - len(self._named)
        rest = [f"and {more} more"] if more else []
        head = f"{self._path} has {self.count} {self._what}{f'; {self._remedy}' if self._remedy else ''}:"
        listed = "\n  ".join([head, *self._named, *rest])
        raise ConfigError(listed)
