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
        str | None, Meta(description="Another one, whose loss is measured and that is never trained on.")
    ] = None
    messages_key: Annotated[
        str,
        Meta(
            description=(
                "Key of a row's chat messages. Rows with `token_ids` and `loss_mask` instead are taken as "
                "they are."
            )
        ),
    ] = "messages"
    tools_key: Annotated[
        str, Meta(description="Key of JSON schemas of tools, which go into the prompt; rows may have none.")
    ] = "tools"
    loss_on: Annotated[
        Literal["assistant", "last_assistant"] | list[str],
        Meta(
            description=(
                "Which tokens are trained on: all that an assistant wrote, end-of-turn tokens included; "
                "those of its last message alone; or what the roles of a list say, such as [assistant, user]."
            )
        ),
    ] = "assistant"
    max_tokens: Annotated[int, Meta(ge=2, description="Longest conversation, tokens.")] = 4096
    long_rows: Annotated[
        Literal["refuse", "filter"],
        Meta(description="Longer ones: `refuse` ends with their lines, `filter` leaves them out."),
    ] = "refuse"
    epochs: Annotated[int, Meta(ge=1, description="Passes over the data.")] = 1
    max_steps: Annotated[
        PositiveInt | None, Meta(description="Optimizer steps at the most; null: as many as epochs need.")
    ] = None
    shuffle: Annotated[bool, Meta(description="Shuffle each epoch with the run's seed.")] = True
    batch_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Tokens of one optimizer step: whole conversations, up to this many. It is cut into "
                "micro-batches by `trainer.micro_batch_tokens`, which changes no result."
            ),
        ),
    ] = 65536
    lr: Annotated[float, Meta(gt=0, description="Peak learning rate; `trainer.optimizer` has the rest.")] = (
        1e-5
    )
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up.")] = 0
    decay: Annotated[
        Literal["cosine", "linear", "constant"],
        Meta(description="How the learning rate falls after the warm-up."),
    ] = "cosine"
    final_lr_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of the peak that is left at the end.")
    ] = 0.1
    validate_every: Annotated[
        int, Meta(ge=0, description="Steps between validations; 0 validates at the end only.")
    ] = 0
    out: Annotated[
        str | None,
        Meta(
            description=(
                "Where the model is written, a Hugging Face folder for `model.path`; null takes `hf` in the "
                "run's folder."
            )
        ),
    ] = None
    worker: Annotated[str, Meta(description="Dotted path of the worker class, one instance a rank.")] = (
        "trainer.sft:SftWorker"
    )
