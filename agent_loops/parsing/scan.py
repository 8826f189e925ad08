"""The common parts of formats that put each call between tags."""

from __future__ import annotations

import ast
import json
import math
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from agent_loops.parsing.calls import Call, MalformedCall, ToolCall, ToolParser

_SPACE = re.compile(r"\s*")
_LITERAL = re.compile(r"True|False|None|[\[{('\"].*[\]})'\"]", re.DOTALL)
_MAX_LITERAL_CHARS = 16_384
"""The limit of texts for Python's parser, whose memory grows with the length."""


_MAX_UNREADABLE = 100
"""After this many unreadable calls the rest of a text counts as one: reading each may scan the whole text."""


class Unreadable(ValueError):
    """A call cannot be read; the message is for the policy."""


class RepeatedKey(Unreadable):
    """An object has a key twice, so that one of the values would be lost."""


class Scanner:
    """Reads a text from a position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def starts_with(self, literal: str) -> bool:
        """Return whether `literal` comes next, after any white space."""
        return self.text.startswith(literal, self._after_space())

    def skip(self, literal: str) -> bool:
        """Skip `literal` and the white space before it, if it comes next; return whether it did."""
        if seen := self.starts_with(literal):
            self.position = self._after_space() + len(literal)
        return seen

    def require(self, literal: str, after: str) -> None:
        """Skip `literal`, which must come next.

        Raises:
            Unreadable: Another text comes next.
        """
        if not self.skip(literal):
            raise Unreadable(f"{after} is not followed by {literal}")

    def read_until(self, literal: str, what: str, *, without: Collection[str]) -> str:
        """Return the text before the next `literal`, and skip both.

        Args:
            literal: The tag that ends the text.
            what: The name of the text, for the message.
            without: Tags that begin something else: before one of them, the closing tag is missing.

        Raises:
            Unreadable: There is no further `literal`, or one of the other tags comes first.
        """
        end = self.text.find(literal, self.position)
        if end < 0:
            raise Unreadable(f"{what} is not closed by {literal}")
        if any(self.text.find(tag, self.position, end) >= 0 for tag in without):
            raise Unreadable(f"{what} is not closed by {literal}")
        start, self.position = self.position, end + len(literal)
        return self.text[start:end]

    def read_json(self) -> Any:
        """Read the JSON value that comes next; its own syntax determines where it ends.

        Raises:
            Unreadable: It is not a JSON value.
        """
        value, self.position = decode_json(self.text, self._after_space())
        return value

    def _after_space(self) -> int:
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # it matches the empty string
        return match.end()


class TaggedParser(ToolParser):
    """Parses a format with an opening and a closing tag for each call."""

    tags: ClassVar[Mapping[str, str]]
    """The closing tag of a call, by its opening tag."""

    @abstractmethod
    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Read the call after the tag `opened`, including its closing tag.

        Raises:
            Unreadable: The call cannot be read.
        """

    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """Implements `ToolParser.read`."""
        begins = re.compile("|".join(map(re.escape, self.tags)))
        scan, calls, unreadable = Scanner(text), list[Call](), 0
        while (begin := begins.search(text, scan.position)) is not None:
            scan.position = begin.end()
            try:
                calls.append(self.read_one(scan, begin.group(), tools))
            except Unreadable as error:
                calls.append(self._skip(scan, begin, str(error)))
                unreadable += 1
                if unreadable > _MAX_UNREADABLE:
                    break
        return calls

    def _skip(self, scan: Scanner, begin: re.Match[str], error: str) -> MalformedCall:
        """Skip to the end of an unreadable call, or to the beginning of the next one."""
        opened, closing = begin.group(), self.tags[begin.group()]
        tag = re.compile(f"{re.escape(opened)}|{re.escape(closing)}").search(scan.text, begin.end())
        if tag is None:
            scan.position = len(scan.text)
        else:
            scan.position = tag.end() if tag.group() == closing else tag.start()
        if tag is None or tag.group() != closing:
            error = f"it is not closed by {closing}"
        return MalformedCall(error=f"the tool call cannot be read: {error}")


def as_call(value: Any, *, arguments: Collection[str] = ("arguments",)) -> ToolCall:
    """Return the call that one JSON object describes.

    Args:
        value: The object.
        arguments: Possible keys of the arguments; without any of them the arguments are empty.

    Raises:
        Unreadable: The object is not a call.
    """
    expected = f'a tool call is an object with "name" and "{next(iter(arguments))}"'
    if not isinstance(value, dict):
        raise Unreadable(expected)
    if strange := sorted(value.keys() - {"name", "type", "id", *arguments}):
        raise Unreadable(f"it has {json.dumps(strange[0])}, but {expected}")
    given = [value[key] for key in arguments if key in value]
    if len(given) > 1:
        raise Unreadable(f"it has its arguments twice, but {expected}")
    return make_call(value.get("name"), *given or [{}])


def add_argument(arguments: dict[str, Any], key: str, value: Any) -> None:
    """Add an argument that was read.

    Raises:
        Unreadable: There is one of this name.
    """
    if key in arguments:
        raise Unreadable(f"it has the argument {key!r} twice")
    arguments[key] = value


def make_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call of a name with arguments, which some models encode twice, as OpenAI's API does.

    Raises:
        Unreadable: The name is missing or the arguments are not an object.
    """
    if not (isinstance(name, str) and name.strip()):
        raise Unreadable('it has no "name"')
    if isinstance(arguments, str):
        try:
            arguments = whole_json(arguments)
        except Unreadable as error:
            raise Unreadable(f"its arguments are {error}") from None
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments are not an object")
    return ToolCall(name=name.strip(), arguments=arguments)


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and the index after it.

    Raises:
        Unreadable: It is not JSON, is nested too deeply, or contains half of a surrogate pair.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        text[start:end].encode()
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unreadable("not valid JSON: half of a surrogate pair") from None
    except RepeatedKey:
        raise
    except ValueError as error:
        raise Unreadable(f"not valid JSON: {error}") from None
    except RecursionError:
        raise Unreadable("not valid JSON: nested too deeply") from None
    return value, end


def whole_json(text: str) -> Any:
    """Return the JSON value that is the whole text.

    Raises:
        Unreadable: The text is not one JSON value.
    """
    text = text.strip()
    value, end = decode_json(text)
    if end < len(text):
        raise Unreadable("not valid JSON: something follows it")
    return value


def typed(text: str, name: str, key: str, tools: Sequence[dict[str, Any]]) -> Any:
    """Return the value of an argument in a format that writes strings without quotes.

    A string according to the tool's schema is returned unchanged. Other values are JSON or Python literals
    (`True`, `['a']`); otherwise the string is returned, and the tool refuses it with its own message.

    Raises:
        Unreadable: It is an object that has a key twice.
    """
    kinds = _kinds(name, key, tools)
    if "string" in kinds:  # it may be a string or a number; only `null` cannot be a string
        return None if "null" in kinds and text.strip() in ("null", "None") else text
    try:
        return whole_json(text)
    except RepeatedKey:
        raise
    except Unreadable:
        return _literal(text)


def _literal(text: str) -> Any:
    """Return the value of a Python literal that is a constant, a list, an object or a quoted text.

    Any other text is returned unchanged: `1,000` is no pair of numbers.

    Raises:
        RepeatedKey: It is an object that has a key twice.
    """
    if len(text) > _MAX_LITERAL_CHARS or not _LITERAL.fullmatch(stripped := text.strip()):
        return text
    try:
        tree = ast.parse(stripped, mode="eval").body
        if ast.get_source_segment(stripped, tree) != stripped:  # a comment follows
            return text
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                _refuse_repeated_keys([(key and ast.literal_eval(key), None) for key in node.keys])
        value = json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
        value.encode()
        return whole_json(value)  # tuples are lists, and keys are text
    except RepeatedKey:
        raise
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _kinds(name: str, key: str, tools: Sequence[dict[str, Any]]) -> set[str]:
    """Return the JSON types that a tool's schema allows for an argument; empty if unspecified."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = _mapping(function.get("parameters"))
            schema = _mapping(parameters.get("properties")).get(key)
            return _types(schema, _mapping(parameters.get("$defs")), depth=8)
    return set()


def _types(schema: Any, definitions: Mapping[str, Any], depth: int) -> set[str]:
    """Return the types of a schema, which may be anything: an agent sends it, and `true` is one."""
    schema = _mapping(schema)
    if depth == 0:  # a schema may refer to itself
        return set()
    if (reference := schema.get("$ref")) is not None:
        return _types(definitions.get(str(reference).rpartition("/")[2]), definitions, depth - 1)
    if (kind := schema.get("type")) is not None:
        return {each for each in ([kind] if isinstance(kind, str) else _list(kind)) if isinstance(each, str)}
    if "enum" in schema or "const" in schema:
        values = _list(schema["enum"]) if "enum" in schema else [schema["const"]]
        return {"string"} if values and all(isinstance(value, str) for value in values) else set()
    options = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return {kind for option in options for kind in _types(option, definitions, depth - 1)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse_repeated_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise RepeatedKey(f"not valid JSON: the key {repeated!r} is there twice")
    return found


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_parse_float, object_pairs_hook=_refuse_repeated_keys
)
