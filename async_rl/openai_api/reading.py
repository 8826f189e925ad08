"""Reads what the dialects' requests have in common, and bounds it.

msgspec checks the types of all fields that are read, and builds no objects for the others. What may have any
form (schemas of tools, arguments of calls) is bounded in size and depth before it is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from async_rl.openai_api.requests import ApiError
from async_rl.runtime.untrusted_json import UNREADABLE

MAX_MESSAGES: Final = 10_000
_MAX_STOPS: Final = 64
_MAX_STOP_CHARS: Final = 1024
"""Stop strings are searched at each piece of a turn."""
_MAX_VALUES: Final = 200_000
"""The most objects and lists of a request, and the most values of any form. A value of three bytes takes 64
bytes of memory, and decoding cannot be interrupted."""
_MAX_DEPTH: Final = 64
"""The deepest nesting of such JSON: schemas of tools have fewer than 20 levels."""
ABSENT: Final = Raw(b"null")

_Body = TypeVar("_Body")


class Part(msgspec.Struct, frozen=True):
    """A part of a content."""

    type: str | None = None
    text: str | None = None


def decode(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode the body of a request.

    Raises:
        ApiError: 400: it is not JSON, has a field of the wrong type, or too many values.
    """
    try:
        return decoder.decode(_limited(body))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        param = place.removesuffix("`") or None
        raise ApiError(400, f"{param or 'the body'}: {problem}", param=param) from error
    except UNREADABLE as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def sampling_parameters(
    raw: msgspec.Struct, names: Sequence[str], free: FreeJson, neutral: Mapping[str, Collection[Any]]
) -> dict[str, Any]:
    """Return the given sampling parameters, without those that would have no effect anywhere.

    Args:
        raw: The request.
        names: All sampling parameters of its dialect.
        free: Decodes values of any form.
        neutral: Values without effect, by parameter.
    """
    found = {}
    for name in names:
        value = getattr(raw, name)
        if isinstance(value, Raw):
            value = free.decode_valid(value, name)
        if value is not None and value not in neutral.get(name, ()):
            found[name] = value
    return found


def digest(value: Any) -> bytes:
    """Return a digest of a JSON value."""
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


class FreeJson:
    """Decodes the parts of one request that may have any form, within a common limit."""

    def __init__(self) -> None:
        self._num_left = _MAX_VALUES

    def decode(self, data: Raw | str, place: str) -> Any:
        """Return the value of JSON.

        Raises:
            ApiError: The request has too much of it.
            msgspec.DecodeError: It is nested too deep, has values that JSON cannot hold, or is no JSON.
        """
        encoded = data.encode() if isinstance(data, str) else bytes(data)
        self._num_left -= sum(encoded.count(mark) for mark in (b",", b"[", b"{"))
        if self._num_left < 0:
            raise ApiError(
                400,
                f"{place}: tools and arguments of calls have more than {_MAX_VALUES} values together",
                param=place,
            )
        value = msgspec.json.decode(encoded)
        if _is_deep(value, _MAX_DEPTH):
            raise msgspec.DecodeError(f"nested deeper than {_MAX_DEPTH} levels")
        return value

    def decode_valid(self, data: Raw, place: str) -> Any:
        """Return the value of JSON that is part of a body; one that cannot be held is refused."""
        try:
            return self.decode(data, place)
        except UNREADABLE as error:
            raise ApiError(400, f"{place}: {error}", param=place) from error


def _limited(body: bytes) -> bytes:
    """Return a body if the number of its objects and lists, also of those in strings, is within the limit."""
    if (number := body.count(b"{") + body.count(b"[")) > _MAX_VALUES:
        raise ApiError(400, f"the body has {number} objects and lists, expected at most {_MAX_VALUES}")
    return body


def _is_deep(value: Any, max_depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not max_depth or any(_is_deep(each, max_depth - 1) for each in inner)


def read_text(content: str | Sequence[Part] | None, place: str, *, skipped: Collection[str] = ()) -> str:
    """Return the text of a content.

    Args:
        content: Text, or parts.
        place: Where it is, for errors.
        skipped: Types of parts that are left out.

    Raises:
        ApiError: 400: it has something else than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.text for part in content if part.type not in skipped]
    if None in texts:
        raise ApiError(
            400, f"{place}: only text is supported, as a string or as parts with text", param=place
        )
    return "".join(text or "" for text in texts)


def read_call(name: str, arguments: Raw, call_id: str | None, place: str, free: FreeJson) -> dict[str, Any]:
    """Return a tool call in the form of chat templates, which want arguments as an object."""
    values = free.decode_valid(arguments, place)
    if isinstance(values, str):
        with suppress(*UNREADABLE):  # what is not JSON, or nested too deep, stays text
            values = free.decode(values.strip() or "null", place)
    # Clients write no arguments in many ways.
    function = {"name": name, "arguments": {} if values is None else values}
    return {"id": call_id or "", "type": "function", "function": function}


def read_function(function: Any, place: str) -> dict[str, Any]:
    """Return a tool as chat templates show it to the policy, without fields that are for servers only."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{place}: expected a function with a name", param=place)
    kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", "function": kept}


def read_schema(kind: str, schema: Raw, place: str, free: FreeJson) -> dict[str, Any]:
    """Return the JSON schema of a format that a request asks for.

    Args:
        kind: `json_schema`, or `json_object` for any object.
        schema: The schema.
        place: Where the format is, for errors.
        free: Decodes it.

    Raises:
        ApiError: 400: it is another format, or has no schema.
    """
    if kind == "json_object":
        return {"type": "object"}
    value = free.decode_valid(schema, place) if kind == "json_schema" else None
    if not isinstance(value, dict):
        raise ApiError(
            400,
            f"{place}: type is {kind!r}, expected json_schema with a schema, or json_object",
            param=place,
        )
    return value


def read_stop(raw: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return stop strings."""
    stops = [raw] if isinstance(raw, str) else raw or ()
    if not all(0 < len(stop) <= _MAX_STOP_CHARS for stop in stops) or len(stops) > _MAX_STOPS:
        raise ApiError(
            400,
            f"{name} must be a string or a list of strings: at most {_MAX_STOPS}, of 1 to {_MAX_STOP_CHARS} "
            "characters",
            param=name,
        )
    return tuple(stops)


def at_least_one(value: int, name: str) -> int:
    """Return a number that is at least 1."""
    if value < 1:
        raise ApiError(400, f"{name} is {value}, expected a whole number of at least 1", param=name)
    return value


def with_instructions(instructions: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that begin with instructions, in one message with other leading system messages.

    Many chat templates have room for one only.
    """
    number = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    texts = [text for text in (instructions, *(each["content"] for each in messages[:number])) if text]
    head = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*head, *messages[number:]]


def without_instructions(num_chars: int, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of `with_instructions` without the instructions, whose length is given."""
    if not num_chars:
        return [*messages]
    rest = messages[0]["content"][num_chars:].removeprefix("\n\n")
    return [*([{"role": "system", "content": rest}] if rest else ()), *messages[1:]]


def with_tool_names(new: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new messages where results have the names of the tools that earlier messages call."""
    calls = (call for message in earlier for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        {**message, "name": names[call_id]} if (call_id := message.get("tool_call_id")) in names else message
        for message in new
    ]
