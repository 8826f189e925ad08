"""Settings of datasets: where they are, keys of their examples, and how datasets are mixed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from async_rl.config.base import Meta, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict

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


class PoolConfig(Strict, frozen=True, kw_only=True):
    """The tasks whose success rate is above that of the pool before, and at most `up_to`."""

    name: Annotated[str, Meta(min_length=1)]
    """Name of the pool in metrics; `unseen` is that of tasks without a success rate."""
    up_to: Annotated[float, Meta(ge=0, le=1)]
    """The highest success rate of its tasks; that of the last pool is 1."""
    weight: NonNegativeFloat
    """How often each of its tasks is drawn, relative to those of other pools; 0: if there are no others."""


class CurriculumConfig(Strict, frozen=True, kw_only=True):
    """Draws tasks by their difficulty: by the success rates of their groups so far, and by a gate.

    See docs/guide/own-task.md.
    """

    pools: list[PoolConfig] = msgspec.field(
        default_factory=lambda: [
            PoolConfig(name="hard", up_to=0.1, weight=0.5),
            PoolConfig(name="medium", up_to=0.9, weight=2.0),
            PoolConfig(name="easy", up_to=1.0, weight=0.25),
        ]
    )
    """Pools by success rate, the hardest first. The rate of a task is the share of its scored trajectories
    with a reward of at least `evaluation.pass_reward`."""
    unseen_weight: NonNegativeFloat = 1.0
    """The weight of tasks of which no group has been scored yet."""
    memory: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """How much the results of earlier groups of a task still count after another one: 0 counts the last group
    only, 1 all groups alike."""
    warm_up: NonNegativeInt = 0
    """Number of tasks that are drawn, each once before any comes again, before the weights apply."""
    gate: str | None = None
    """Dotted path of a function of a task that returns how many tasks are drawn before this one may be;
    `agent_loops.gates:by_length` lets in longer and longer prompts. Null lets in all tasks."""
    gate_args: dict[str, Any] = {}
    """Keyword arguments of the gate."""


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
    curriculum: CurriculumConfig | None = None
    """Draw tasks by their difficulty; null draws each once per epoch. `{}` has the default pools."""
    epochs: PositiveInt | None = None
    """Epochs over the data, each of as many tasks as there are examples; null continues until
    `run.max_steps`."""
