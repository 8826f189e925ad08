"""Tools from plain typed Python functions."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, get_type_hints

import msgspec

from async_rl.errors import ConfigError, ToolError
from async_rl.loading import load_object
from async_rl.threads import call_in_thread
from async_rl.waits import waiting

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example|Examples|Note|Notes|Source):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^ *(\w+)(?: *\([^)]*\))?: *(.+)$")
_PLAIN_DEFAULTS = (str, int, float, bool, type(None))


class Tool:
    """A function the policy may call: its name, its JSON schema, and a checked, timed call.

    The schema comes from the signature, the descriptions from the docstring (Google style). Parameters of
    any type that msgspec can convert are fine: numbers, strings, `Literal`, lists, dicts, Structs.

    Example:
        >>> def weather(city: str, days: int = 1) -> str:
        ...     '''Forecast the weather.
        ...
        ...     Args:
        ...         city: Name of the city.
        ...         days: How far ahead.
        ...     '''
        >>> tool = Tool(weather)
        >>> await tool.call({"city": "Oslo"}, timeout_s=5)

    Args:
        function: Sync (run in a thread of its own) or async. Every parameter has a type annotation.

    Raises:
        ConfigError: The function cannot be described to a model.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name: str = function.__name__
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self.description, parameter_docs = _read_docstring(function)
        self._arguments_type = _arguments_type(function, parameter_docs)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": _object_schema(self._arguments_type),
            },
        }

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> str:
        """Check the arguments, run the function, and give its result as text (JSON unless it is a string).

        A sync function that runs past its time keeps its thread until it returns; nobody waits for it.

        Raises:
            ToolError: The arguments do not fit, the function raised, or it ran past its time.
        """
        try:
            checked = msgspec.convert(dict(arguments), self._arguments_type)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: wrong arguments: {error}") from error
        values = {field: getattr(checked, field) for field in checked.__struct_fields__}
        try:
            async with (
                asyncio.timeout(timeout_s) as deadline,
                waiting("tool", self.name, scope=deadline),
            ):
                if self._is_async:
                    result = await self._function(**values)
                else:
                    result = await call_in_thread(partial(self._function, **values), name=f"tool-{self.name}")
        except TimeoutError as error:
            if deadline.expired():
                raise ToolError(f"{self.name}: no result within {timeout_s:g} s") from error
            raise ToolError(f"{self.name}: {_describe(error)}") from error
        except Exception as error:  # the tool's own code raises what it likes
            raise ToolError(f"{self.name}: {_describe(error)}") from error
        return _as_text(self.name, result)


def load_tool(path: str) -> Tool:
    """The tool at a dotted path: a function, or a `Tool`.

    Raises:
        ConfigError: There is none, or it cannot be described to a model.
    """
    value = load_object(path, what="tool")
    if isinstance(value, Tool):
        return value
    if not inspect.isroutine(value):
        raise ConfigError(f"tool {path!r} is {type(value).__name__}; expected a function or a Tool")
    return Tool(value)


def _arguments_type(function: Callable[..., Any], docs: Mapping[str, str]) -> type[msgspec.Struct]:
    """A strict Struct with the function's parameters as fields."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {function.__name__!r}: an annotation cannot be resolved: {error}") from error
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or parameter.name not in hints:
            raise ConfigError(
                f"tool {function.__name__!r}: parameter {str(parameter)!r} must be a named one with a type "
                "annotation, because the model is told its type"
            )
        hint = hints[parameter.name]
        if parameter.name in docs:
            hint = Annotated[hint, msgspec.Meta(description=docs[parameter.name])]
        fields.append((parameter.name, hint, *_default(parameter)))
    arguments_type = msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)
    return arguments_type


def _default(parameter: inspect.Parameter) -> tuple[Any, ...]:
    if parameter.default is parameter.empty:
        return ()
    if isinstance(parameter.default, _PLAIN_DEFAULTS):
        return (parameter.default,)
    return (msgspec.field(default_factory=lambda: parameter.default),)


def _object_schema(arguments_type: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        (_,), components = msgspec.json.schema_components([arguments_type], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ConfigError(f"tool {arguments_type.__name__!r}: {error}") from error
    own = dict(components.pop(arguments_type.__name__))
    schema = {"type": "object", "properties": own["properties"], "required": own.get("required", [])}
    return {**schema, "$defs": components} if components else schema


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the function does, and what each parameter is."""
    docstring = inspect.getdoc(function) or ""
    parts = _SECTION.split(docstring)
    description = " ".join(parts[0].split())
    if not description:
        raise ConfigError(
            f"tool {function.__name__!r} has no docstring; expected one, because the model is told what it "
            "does"
        )
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    docs: dict[str, str] = {}
    current = indent = None
    for line in sections.get("Args", "").splitlines():
        depth = len(line) - len(line.lstrip())
        match = _PARAMETER.match(line)
        if match and (indent is None or depth <= indent):
            indent, current = depth, match[1]
            docs[current] = match[2].strip()
        elif current and line.strip():
            docs[current] += " " + line.strip()
    return description, docs


def _as_text(name: str, result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError) as error:
        raise ToolError(f"{name}: the result is not JSON: {error}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
