"""Settings of datasets: where they are, keys of their examples, and how datasets are mixed."""

from __future__ import annotations

from typing import Literal

from async_rl.config.base import PositiveFloat, PositiveInt, Strict

ExampleField = Literal["messages", "answer", "id", "agent_loop", "reward", "data_source", "tools", "metadata"]
"""What is read of an example, by the names of `data.schemas.Keys`."""


class RowsConfig(Strict, frozen=True, kw_only=True):
    """How the examples of a dataset are read. A key may be dotted: `reward_model.ground_truth`."""

    schema: Literal["auto", "plain", "verl", "slime"] | None = None
    """Default keys of an example; `auto` decides by the first example, and `async-rl check` prints the
    result; see docs/guide/own-task.md. Null is `auto` in `data` itself; a dataset with null takes
    `data.schema`."""
    keys: dict[ExampleField, str] = {}
    """Keys of an example where they differ from the schema's: `{messages: question, answer: solution.final}`.
    `id`: without one, examples are named by position. `agent_loop` and `reward`: names in
    `rollout.agent_loops` and `rollout.rewards` (or dotted paths with `rollout.trust_examples`).
    `data_source`: the collection that the example comes from. `tools`: JSON schemas that are added to the
    prompt. `metadata`: an object whose keys become metadata of the task. A dataset takes those that it does
    not set from `data.keys`."""


class SourceConfig(RowsConfig, frozen=True, kw_only=True):
    """A dataset."""

    path: str
    """A dataset of tasks, as `data.path`."""
    name: str | None = None
    """Name of the dataset; null takes the stem of the file, or the name of the folder or on the Hub."""


class DatasetConfig(SourceConfig, frozen=True, kw_only=True):
    """One of several datasets to train on."""

    weight: PositiveFloat | None = None
    """Sampling weight relative to the other datasets; null for all takes every example once per epoch."""


class DataConfig(RowsConfig, frozen=True, kw_only=True):
    """Where tasks come from: one dataset or several. Keys of an example that no setting names become metadata
    of the task.
    """

    path: str | None = None
    """A dataset of tasks: a .jsonl, .json, .csv or .parquet file, a folder of the package `datasets`, or
    `hub:OWNER/NAME` on the Hugging Face Hub, with `?config=…&split=…&revision=…` behind the last two; null if
    `datasets` is set. See docs/guide/own-task.md."""
    datasets: list[DatasetConfig] = []
    """Several datasets, mixed by weight; keys that they do not set are taken from `data`."""
    validation: list[SourceConfig] = []
    """Datasets that are evaluated and never trained on."""
    long_prompts: Literal["refuse", "filter", "keep"] = "refuse"
    """What happens to prompts longer than `max_prompt_tokens`: `refuse` ends with an error that lists their
    lines, `filter` leaves them out and reports how many, `keep` does not check: they are dropped when they
    are dispatched."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum prompt length, tokens, including the example's tools but not those of the agent loop; null
    leaves space for one new token in `rollout.max_context_tokens`."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""
    epochs: PositiveInt | None = None
    """Epochs over the data, each of as many tasks as there are examples; null continues until
    `run.max_steps`."""
