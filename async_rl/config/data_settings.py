"""Settings of datasets: where rows are, under which keys, how they are mixed."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveFloat, PositiveInt, Strict


class RowsConfig(Strict, frozen=True, kw_only=True):
    """How the rows of a dataset are read. A key may be dotted: `reward_model.ground_truth`."""

    schema: Annotated[
        Literal["auto", "plain", "verl", "slime"] | None,
        Meta(
            description=(
                "Which keys a row has, where they are not named here; `auto` looks at the first row, and "
                "`async-rl check` says what it found; see docs/guide/own-task.md. "
                "Null takes `data.schema`, which "
                "is `auto`."
            )
        ),
    ] = None
    messages_key: Annotated[
        str | None, Meta(description="Key of the chat messages, or of a prompt string; null: the schema's.")
    ] = None
    answer_key: Annotated[
        str | None,
        Meta(description="Key of the reference answer, null where a row has none; null: the schema's."),
    ] = None
    id_key: Annotated[
        str | None, Meta(description="Key of the row's id; rows without are named by position.")
    ] = None
    agent_loop_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of a row's own agent loop, a dotted path or a name of `rollout.agent_loops`; rows "
                "without take `rollout.agent_loop`."
            )
        ),
    ] = None
    reward_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of a row's own reward, a dotted path or a name of `rollout.rewards`; rows without take "
                "that of their data source, or `rollout.reward`."
            )
        ),
    ] = None
    data_source_key: Annotated[
        str | None, Meta(description="Key of the name of the collection a row is from.")
    ] = None
    tools_key: Annotated[
        str | None, Meta(description="Key of JSON schemas of tools, which go into the prompt.")
    ] = None
    metadata_key: Annotated[
        str | None, Meta(description="Key of an object whose own keys become metadata of the task.")
    ] = None


class SourceConfig(RowsConfig, frozen=True, kw_only=True):
    """A dataset."""

    path: Annotated[str, Meta(description="A .jsonl or .parquet file of tasks.")]
    name: Annotated[str | None, Meta(description="What it is called; null takes the file's stem.")] = None


class DatasetConfig(SourceConfig, frozen=True, kw_only=True):
    """One of several datasets to train on."""

    weight: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "How often a task of it comes, beside the weights of the others; null for all: every row "
                "once an epoch."
            )
        ),
    ] = None


class DataConfig(RowsConfig, frozen=True, kw_only=True):
    """Where tasks come from: one file or several. What is no key below becomes the task's metadata."""

    path: Annotated[
        str | None, Meta(description="A .jsonl or .parquet file of tasks; null where `datasets` names them.")
    ] = None
    datasets: Annotated[
        list[DatasetConfig],
        Meta(description="Several datasets, mixed by weight; keys they do not name are taken from `data`."),
    ] = []
    validation: Annotated[
        list[SourceConfig], Meta(description="Datasets that are checked as well and never trained on.")
    ] = []
    long_prompts: Annotated[
        Literal["refuse", "filter", "keep"],
        Meta(
            description=(
                "Prompts of more than `max_prompt_tokens`: `refuse` ends with their lines, `filter` leaves "
                "them out and says how many, `keep` does not look: they are dropped when their turn comes."
            )
        ),
    ] = "refuse"
    max_prompt_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Longest prompt, tokens, tools of the row included and those of the loop not; null takes "
                "what leaves room for one token in `rollout.max_context_tokens`."
            )
        ),
    ] = None
    shuffle: Annotated[bool, Meta(description="Shuffle each epoch with the run's seed.")] = True
    epochs: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Passes over the data, each of as many tasks as there are rows; null goes on until "
                "`run.max_steps`."
            )
        ),
    ] = None
