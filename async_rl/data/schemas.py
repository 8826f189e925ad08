"""The schemas of datasets, and how an example becomes a `Task`. Pure.

```
             messages             answer                        agent loop    metadata
 plain       messages | prompt    answer                        agent_loop    every other key
 verl        prompt               reward_model.ground_truth     agent_name    every other key
 slime       prompt               label                         agent_loop    metadata, every other key
```

Source: verl's `docs/preparation/prepare_data.rst` and `utils/dataset/rl_dataset.py`; slime's
`--input-key`, `--label-key`, `--metadata-key` and `--tool-key` with the values that its examples give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from async_rl.config import RowsConfig
from async_rl.errors import ConfigError
from async_rl.runtime.untrusted_json import UNREADABLE
from async_rl.types import Task

Schema = Literal["plain", "verl", "slime"]

_PROMPT: Final = "prompt"
"""The key that may hold a plain prompt string if an example has no messages."""

_VALUES: Final = ("const", "default", "examples")
"""Keywords of JSON schemas that hold values; null may be one of them."""

_MAX_KEYS: Final = 20
"""An error names this many keys of an example."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a schema, dotted for values inside objects; None if the schema has no such key."""

    messages: str
    answer: str
    id: str | None = None
    agent_loop: str = "agent_loop"
    reward: str = "reward_function"
    data_source: str = "data_source"
    tools: str = "tools"
    metadata: str | None = None

    @property
    def used_keys(self) -> set[str]:
        """Top-level keys that do not become metadata.

        An object that a dotted key looks into does, without the answer.
        """
        names = {getattr(self, name) for name in self.__struct_fields__} | {_PROMPT}
        return {name for name in names if name}


PRESETS: Final[Mapping[Schema, Keys]] = {
    "plain": Keys(messages="messages", answer="answer", id="id"),
    "verl": Keys(messages="prompt", answer="reward_model.ground_truth", agent_loop="agent_name"),
    "slime": Keys(messages="prompt", answer="label", metadata="metadata"),
}


def detect_schema(example: Any) -> Schema:
    """Return the schema whose keys an example has; `plain` if it has the keys of no other."""
    if not isinstance(example, Mapping) or "messages" in example or "prompt" not in example:
        return "plain"
    if "reward_model" in example:
        return "verl"
    return "slime" if "label" in example else "plain"


def configured_keys(*configs: RowsConfig) -> dict[str, str]:
    """Return the keys that configs set, by the field of `Keys`; earlier configs take precedence."""
    return {field: key for config in reversed(configs) for field, key in config.keys.items()}


def keys_of(schema: Schema, *configs: RowsConfig) -> Keys:
    """Return the schema's keys with those that configs set."""
    return msgspec.structs.replace(PRESETS[schema], **configured_keys(*configs))


def chosen_schema(*configs: RowsConfig) -> Schema | None:
    """Return the schema of the first config that sets one; None for `auto`."""
    named = next((config.schema for config in configs if config.schema is not None), "auto")
    return next((schema for schema in get_args(Schema) if schema == named), None)


def to_task(example: Any, number: int, where: str, keys: Keys) -> Task:
    """Convert an example to a task.

    Args:
        example: The decoded JSON or parquet value.
        number: Its index within its file, from 0.
        where: File and line, for error messages.
        keys: The keys of its schema.

    Raises:
        ConfigError: The example is malformed; the message says where, what was found and what was expected.
    """
    if not isinstance(example, dict):
        raise ConfigError(
            f"{where}: the example is {kind(example)}; expected an object with {keys.messages!r}"
        )
    key = keys.messages if _get(example, keys.messages) is not None else _PROMPT
    task_id = _get(example, keys.id)
    if not (task_id is None or (isinstance(task_id, str | int) and not isinstance(task_id, bool))):
        raise ConfigError(f"{where}: {keys.id!r} is {kind(task_id)}; expected a string or an integer")
    names: dict[str, str | None] = {}
    for name, what in (
        (keys.agent_loop, "a name of rollout.agent_loops or null"),
        (keys.reward, "a name of rollout.rewards or null"),
        (keys.data_source, "a name or null"),
    ):
        value = _get(example, name)
        if not (value is None or isinstance(value, str)):
            raise ConfigError(f"{where}: {name!r} is {kind(value)}; expected {what}")
        names[name] = value or None
    tools = parse_tools(_get(example, keys.tools), f"{where}: {keys.tools!r}")
    return Task(
        task_id=f"row-{number}" if task_id is None else str(task_id),
        messages=_messages(_get(example, key), where, keys.messages, example, tools),
        answer=_get(example, keys.answer),
        metadata=_without(
            {name: value for name, value in example.items() if name not in keys.used_keys},
            () if keys.answer in example else keys.answer.split("."),
        )
        | _metadata(_get(example, keys.metadata), where, keys.metadata),
        agent_loop=names[keys.agent_loop],
        reward=names[keys.reward],
        data_source=names[keys.data_source] or "",
        tools=tools,
    )


def kind(value: Any) -> str:
    """Return the kind of a JSON value, for error messages."""
    if value is None:
        return "missing"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"{type(value).__name__} {value!r:.40}")


def _get(example: Mapping[str, Any], key: str | None) -> Any:
    """Return the value at a key, or None; a dotted key that is not present itself looks into objects."""
    if key is None or key in example:
        return None if key is None else example[key]
    value: Any = example
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without(value: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return an object without the value at a path: agents see metadata, and are not told the answer."""
    if not path or path[0] not in value:
        return value
    name, *rest = path
    if not rest:
        return {key: each for key, each in value.items() if key != name}
    inner = value[name]
    return value | {name: _without(inner, rest)} if isinstance(inner, dict) else value


def has_key(example: Mapping[str, Any], key: str) -> bool:
    """Return whether an example has a key, possibly with null; dotted as in `Keys`."""
    if key in example:
        return True
    outer, _, inner = key.partition(".")
    value = example.get(outer)
    return bool(inner) and isinstance(value, Mapping) and has_key(value, inner)


def name_keys(example: Mapping[str, Any]) -> str:
    """Return the keys of an example that have a value, for error messages."""
    names = [repr(key) for key, value in example.items() if value is not None]
    more = [f"{len(names) - _MAX_KEYS} more"] if len(names) > _MAX_KEYS else []
    return ", ".join(names[:_MAX_KEYS] + more) or "none"


def _messages(
    value: Any, where: str, key: str, example: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if value is None:
        raise ConfigError(
            f"{where}: {key!r} is missing; the example has the keys {name_keys(example)}: set "
            "data.keys.messages to the one that holds the chat messages or the prompt"
        )
    if not isinstance(value, list) or not value:
        found = "empty" if value in ("", []) else kind(value)
        raise ConfigError(f"{where}: {key!r} is {found}; expected a list of chat messages or a prompt string")
    for index, message in enumerate(value):
        at = f"{where}: {key!r}[{index}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{at} is {kind(message)}; expected an object with 'role' and 'content'")
        if not (isinstance(message.get("role"), str) and message["role"]):
            raise ConfigError(f"{at} has no 'role'; expected system, user, assistant or tool")
        content = message.get("content")
        if not (isinstance(content, str | list) or (content is None and message.get("tool_calls"))):
            raise ConfigError(f"{at}: 'content' is {kind(content)}; expected a string")
    return [clean_message(message, tools) for message in value]


def clean_message(message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message without the nulls that stand for missing keys, also of its calls."""
    cleaned = {name: part for name, part in message.items() if part is not None}
    if isinstance(calls := cleaned.get("tool_calls"), list):
        cleaned["tool_calls"] = [_clean_call(call, tools) for call in calls]
    return cleaned


def _metadata(value: Any, where: str, key: str | None) -> dict[str, Any]:
    value = _decoded(value)
    if not (value is None or isinstance(value, dict)):
        raise ConfigError(f"{where}: {key!r} is {kind(value)}; expected an object or null")
    return dict(value or {})


def parse_tools(value: Any, place: str) -> list[dict[str, Any]]:
    """Return an example's tools, without the nulls that stand for missing keys.

    Raises:
        ConfigError: They are no list of schemas.
    """
    value = _decoded(value)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ConfigError(f"{place} is {kind(value)}; expected a list of JSON schemas or null")
    return [_clean_tool(tool) for tool in value]


def _clean_tool(schema: Any, *, of_properties: bool = False) -> Any:
    """Return a tool's schema without the nulls that stand for missing keys, as in lines written from parquet.

    Args:
        schema: The schema, or a part of it.
        of_properties: Whether the keys are names of properties instead of keywords.
    """
    if isinstance(schema, list):
        return [_clean_tool(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    values = () if of_properties else _VALUES
    return {
        key: each
        if key in values
        else _clean_tool(each, of_properties=key == "properties" and not of_properties)
        for key, each in schema.items()
        if each is not None or key in values
    }


def _clean_call(call: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return a tool call without the nulls that stand for missing keys.

    Arguments keep those that the tool's schema takes, and those of objects with any keys.
    """
    if not isinstance(call, Mapping):
        return call
    cleaned = {key: value for key, value in call.items() if value is not None}
    if isinstance(function := cleaned.get("function"), Mapping):
        return cleaned | {"function": _clean_call(function, tools)}
    if isinstance(arguments := cleaned.get("arguments"), Mapping):
        cleaned["arguments"] = _clean_value(arguments, _parameters(cleaned.get("name"), tools))
    return cleaned


def _parameters(name: Any, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; one without properties if it has none."""
    functions = (tool.get("function", tool) for tool in tools)
    schemas = (
        each.get("parameters") for each in functions if isinstance(each, Mapping) and each.get("name") == name
    )
    return {"properties": {}} | next((each for each in schemas if isinstance(each, dict)), {})


def _takes_null(schema: Any) -> bool:
    kinds = schema.get("type", "null") if isinstance(schema, Mapping) else "null"
    return "null" in (kinds if isinstance(kinds, list) else [kinds])


def _clean_value(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_clean_value(each, schema.get("items")) for each in value]
    properties = schema.get("properties")
    if not (isinstance(value, Mapping) and isinstance(properties, Mapping)):
        return value
    return {
        key: _clean_value(each, properties.get(key))
        for key, each in value.items()
        if each is not None or (key in properties and _takes_null(properties[key]))
    }


def _decoded(value: Any) -> Any:
    """Decode JSON text, as parquet columns hold it if examples have different keys."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value) if value else None
    except UNREADABLE:
        return value
