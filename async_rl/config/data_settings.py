"""Settings of datasets: files, keys of their examples, and how datasets are mixed."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveFloat, PositiveInt, Strict


class RowsConfig(Strict, frozen=True, kw_only=True):
    """How the examples of a dataset are read. A key may be dotted: `reward_model.ground_truth`."""

    schema: Annotated[
        Literal["auto", "plain", "verl", "slime"] | None,
        Meta(
            description=(
                "Default keys of an example; `auto` decides by the first example, and `async-rl "
                "check` prints the result; see docs/guide/own-task.md. Null is `auto` in `data` "
                "itself; a dataset with null takes `data.schema`."
            )
        ),
    ] = None
    messages_key: Annotated[
        str | None,
        Meta(description="Key of the chat messages, or of a prompt string; null takes that of the schema."),
    ] = None
    answer_key: Annotated[
        str | None,
        Meta(description="Key of the reference answer, which may be null; null takes that of the schema."),
    ] = None
    id_key: Annotated[
        str | None, Meta(description="Key of the example's id; examples without one are named by position.")
    ] = None
    agent_loop_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of an example's own agent loop, a name of `rollout.agent_loops` (or a dotted path with "
                "`rollout.trust_examples`); examples without one use `rollout.agent_loop`."
            )
        ),
    ] = None
    reward_key: Annotated[
        str | None,
        Meta(
            description=(
                "Key of an example's own reward, a name of `rollout.rewards` (or a dotted path with "
                "`rollout.trust_examples`); examples without one use that of their data source, or "
                "`rollout.reward`."
            )
        ),
    ] = None
    data_source_key: Annotated[
        str | None, Meta(description="Key of the name of the collection that an example comes from.")
    ] = None
    tools_key: Annotated[
        str | None, Meta(description="Key of JSON schemas of tools, which are added to the prompt.")
    ] = None
    metadata_key: Annotated[
        str | None, Meta(description="Key of an object whose keys become metadata of the task.")
    ] = None


class SourceConfig(RowsConfig, frozen=True, kw_only=True):
    """A dataset."""

    path: Annotated[str, Meta(description="A .jsonl or .parquet file of tasks.")]
    name: Annotated[str | None, Meta(description="Name of the dataset; null takes the stem of the file.")] = (
        None
    )


class DatasetConfig(SourceConfig, frozen=True, kw_only=True):
    """One of several datasets to train on."""

    weight: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Sampling weight relative to the other datasets; null for all takes every example "
                "once per epoch."
            )
        ),
    ] = None


class DataConfig(RowsConfig, frozen=True, kw_only=True):
    """Where tasks come from: one file or several. Keys of an example that no setting names become the task's
    metadata.
    """

    path: Annotated[
        str | None, Meta(description="A .jsonl or .parquet file of tasks; null if `datasets` is set.")
    ] = None
    datasets: Annotated[
        list[DatasetConfig],
        Meta(
            description=(
                "Several datasets, mixed by weight; keys that they do not set are taken from `data`."
            )
        ),
    ] = []
    validation: Annotated[
        list[SourceConfig], Meta(description="Datasets that are evaluated and never trained on.")
    ] = []
    long_prompts: Annotated[
        Literal["refuse", "filter", "keep"],
        Meta(
            description=(
                "What happens to prompts longer than `max_prompt_tokens`: `refuse` ends with an "
                "error that lists their lines, `filter` leaves them out and reports how many, "
                "`keep` does not check: they are dropped when they are dispatched."
            )
        ),
    ] = "refuse"
    max_prompt_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Maximum prompt length, tokens, including the example's tools but not those of "
                "the agent loop; null leaves space for one new token in "
                "`rollout.max_context_tokens`."
            )
        ),
    ] = None
    shuffle: Annotated[bool, Meta(description="Shuffle each epoch with the run's seed.")] = True
    epochs: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Epochs over the data, each of as many tasks as there are examples; null "
                "continues until `run.max_steps`."
            )
        ),
    ] = None
