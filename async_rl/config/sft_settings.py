"""Settings of the supervised warm start: `async-rl sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, PositiveInt, Strict


class SftConfig(Strict, frozen=True, kw_only=True):
    """Supervised training on conversations; layout, memory and checkpoints are those of `trainer`.

    See docs/guide/evaluation-and-sft.md.
    """

    path: Annotated[
        str | None, Meta(description="A .jsonl or .parquet file of conversations, for `async-rl sft`.")
    ] = None
    validation: Annotated[
        str | None,
        Meta(description="A file of conversations whose loss is measured and that is never trained on."),
    ] = None
    keys: Annotated[
        dict[Literal["messages", "tools"], str],
        Meta(
            description=(
                "Keys of an example's chat messages and of its tools, whose JSON schemas are added to the "
                "prompt, where they are not `messages` and `tools`. Examples with `token_ids` and "
                "`loss_mask` are used as they are."
            )
        ),
    ] = {}
    loss_on: Annotated[
        Literal["assistant", "last_assistant"] | list[str],
        Meta(
            description=(
                "Which tokens are trained on: `assistant`: all tokens that the assistant wrote, "
                "end-of-turn tokens included; `last_assistant`: those of its last message only; "
                "or a list of roles, such as [assistant, user]."
            )
        ),
    ] = "assistant"
    max_tokens: Annotated[int, Meta(ge=2, description="Maximum length of a conversation, tokens.")] = 4096
    long_rows: Annotated[
        Literal["refuse", "filter"],
        Meta(
            description=(
                "What happens to longer conversations: `refuse` ends with an error that lists "
                "their lines, `filter` leaves them out."
            )
        ),
    ] = "refuse"
    epochs: Annotated[int, Meta(ge=1, description="Epochs over the data.")] = 1
    max_steps: Annotated[
        PositiveInt | None,
        Meta(description="Maximum number of optimizer steps; null takes as many as the epochs need."),
    ] = None
    batch_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Tokens per optimizer step: whole conversations, up to this many. "
                "`trainer.micro_batch_tokens` splits them into micro-batches without changing the "
                "result."
            ),
        ),
    ] = 65536
    lr: Annotated[
        float,
        Meta(gt=0, description="Peak learning rate; the other settings are those of `trainer.optimizer`."),
    ] = 1e-5
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    decay: Annotated[
        Literal["cosine", "linear", "constant"],
        Meta(description="How the learning rate falls to a tenth after the warm-up."),
    ] = "cosine"
    validate_every: Annotated[
        int, Meta(ge=0, description="Steps between validations; 0 validates only at the end.")
    ] = 0
    out: Annotated[
        str | None,
        Meta(
            description=(
                "Where the model is written, as a Hugging Face folder for `model.path`; null "
                "takes `hf` in the run's folder."
            )
        ),
    ] = None
    worker: Annotated[
        str, Meta(description="Dotted path of the worker class; each rank has one instance.")
    ] = "trainer.sft:SftWorker"
