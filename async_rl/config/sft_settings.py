"""Settings of the supervised warm start: `async-rl sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from async_rl.config.base import Meta, NonNegativeInt, PositiveFloat, PositiveInt, Strict


class SftConfig(Strict, frozen=True, kw_only=True):
    """Supervised training on conversations; layout, memory and checkpoints are those of `trainer`.

    See docs/guide/evaluation-and-sft.md.
    """

    path: str | None = None
    """A dataset of conversations, as `data.path`, for `async-rl sft`."""
    validation: str | None = None
    """A dataset of conversations whose loss is measured and that is never trained on."""
    keys: dict[Literal["messages", "tools"], str] = {}
    """Keys of an example's chat messages and of its tools, whose JSON schemas are added to the prompt, where
    they are not `messages` and `tools`. Examples with `token_ids` and `loss_mask` are used as they are."""
    loss_on: Literal["assistant", "last_assistant"] | list[str] = "assistant"
    """Which tokens are trained on: `assistant`: all tokens that the assistant wrote, end-of-turn tokens
    included; `last_assistant`: those of its last message only; or a list of roles, such as [assistant,
    user]."""
    max_tokens: Annotated[int, Meta(ge=2)] = 4096
    """Maximum length of a conversation, tokens."""
    long_rows: Literal["refuse", "filter"] = "refuse"
    """What happens to longer conversations: `refuse` ends with an error that lists their lines, `filter`
    leaves them out."""
    epochs: PositiveInt = 1
    """Epochs over the data."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; null takes as many as the epochs need."""
    batch_tokens: PositiveInt = 65536
    """Tokens per optimizer step: whole conversations, up to this many. `trainer.micro_batch_tokens` splits
    them into micro-batches without changing the result."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate; the other settings are those of `trainer.optimizer`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls to a tenth after the warm-up."""
    validate_every: NonNegativeInt = 0
    """Steps between validations; 0 validates only at the end."""
    out: str | None = None
    """Where the model is written, as a Hugging Face folder for `model.path`; null takes `hf` in the run's
    folder."""
    worker: str = "trainer.sft:SftWorker"
    """Dotted path of the worker class; each rank has one instance."""
