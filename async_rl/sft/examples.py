"""Reads conversations as tokens with a loss mask, in the form that rollouts would have produced.

Each turn of the assistant is rendered by itself, and the text between two turns after it, exactly as a
session builds a trajectory (`async_rl.data.chat_format`): a template that rewrites earlier turns (drops
thoughts, trims white space) does not change the training data, and the mask is exact to the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from async_rl.config import SftConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.data.dataset import ExampleErrors
from async_rl.data.example_files import read_examples
from async_rl.data.schemas import clean_message, name_keys, parse_tools
from async_rl.errors import ConfigError
from async_rl.runtime.untrusted_json import UNREADABLE
from async_rl.sft.schedule import SftExample


def load_conversations(
    path: str, place: str, config: SftConfig, chat: ChatFormat
) -> tuple[list[SftExample], int]:
    """Read all conversations of a dataset.

    Args:
        path: The file, folder or name on the Hub.
        place: The config key that names it.
        config: Keys, lengths and what is trained on.
        chat: The model's chat format.

    Returns:
        The examples, and how many were left out because they are too long.

    Raises:
        ConfigError: The file cannot be read, or examples cannot be used: up to ten of them, by file and line.
    """
    bad = ExampleErrors(path, "examples that cannot be trained on")
    long = ExampleErrors(
        path,
        "conversations that are too long",
        "raise sft.max_tokens, or set sft.long_rows=filter to leave them out",
    )
    examples = []
    for where, raw in read_examples(path, place):
        try:
            example = _parse_example(raw, config, chat)
        except ConfigError as error:
            text = str(error)
            bad.add_error(text if text.startswith(where) else f"{where}: {text}")
            continue
        if len(example.token_ids) > config.max_tokens:
            long.add_error(f"{where}: {len(example.token_ids)} tokens, sft.max_tokens is {config.max_tokens}")
        else:
            examples.append(example)
    bad.raise_if_any()
    if config.long_rows == "refuse":
        long.raise_if_any()
    if not examples:
        raise ConfigError(f"{place}: {path!r} has no example to train on; expected at least one")
    return examples, long.count


def _parse_example(raw: Any, config: SftConfig, chat: ChatFormat) -> SftExample:
    if isinstance(raw, ConfigError):
        raise raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{raw!r:.60} is not an object")
    if "token_ids" in raw:
        return _parse_tokens(raw)
    messages_key, tools_key = (config.keys.get(field, field) for field in ("messages", "tools"))
    messages = raw.get(messages_key)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(
            f"{messages_key!r} is {messages!r:.60}, expected a list of messages; its keys are "
            f"{name_keys(raw)} (see sft.keys.messages)"
        )
    tools = parse_tools(raw.get(tools_key), repr(tools_key))
    parsed = [_parse_message(message, tools) for message in messages]
    token_ids, loss_mask = chat.encode_conversation(
        parsed, tools, train_on=_trained_messages(messages, config)
    )
    return SftExample(token_ids=token_ids, loss_mask=loss_mask)


def _parse_tokens(raw: Mapping[str, Any]) -> SftExample:
    """Parse an example that is already tokenised."""
    try:
        token_ids = np.asarray(raw["token_ids"], np.int32)
        loss_mask = np.asarray(raw["loss_mask"], bool)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"expected token_ids and loss_mask as lists of integers: {error}") from error
    if token_ids.ndim != 1 or token_ids.shape != loss_mask.shape or len(token_ids) < 2:
        raise ConfigError(
            f"{token_ids.size} token_ids and {loss_mask.size} loss_mask, expected equal lists of at least 2"
        )
    if not loss_mask[1:].any():  # the first token is not predicted
        raise ConfigError("loss_mask trains on no token, so the example has no effect")
    return SftExample(token_ids=token_ids, loss_mask=loss_mask)


def _parse_message(message: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parse a message; drop the nulls that parquet adds, and decode arguments of calls for chat templates."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"the message {message!r:.60} has no role")
    kept = {"content": "", **clean_message(message, tools)}
    kept.pop("weight", None)
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_parse_call(call) for call in calls]
    return kept


def _parse_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ConfigError(f"the tool call {call!r:.60} names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, "arguments")
    known = {"id": call["id"]} if call.get("id") else {}  # which some templates render
    return {**known, "type": "function", "function": {**function, "arguments": arguments}}


def _parse_json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE as error:
        raise ConfigError(f"{what} {text!r:.60} is not JSON: {error}") from error


def _trained_messages(messages: Sequence[Mapping[str, Any]], config: SftConfig) -> list[int]:
    """Return the messages that are trained on: those of the selected roles, except those with `weight` 0."""
    roles = config.loss_on if isinstance(config.loss_on, list) else ["assistant"]
    selected = [index for index, message in enumerate(messages) if message["role"] in roles]
    if config.loss_on == "last_assistant":
        selected = selected[-1:]
    elif not selected and isinstance(config.loss_on, list):
        found = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ConfigError(f"no message is of a role in sft.loss_on = {roles}: its roles are {found}")
    trained = [index for index in selected if messages[index].get("weight") != 0]
    if selected and not trained:
        raise ConfigError(
            f"all its messages of {' and '.join(roles)} have weight 0, so the example has no effect"
        )
    return trained
