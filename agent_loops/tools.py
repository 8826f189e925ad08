"""Tools from typed Python: plain functions, and classes with a state for each trajectory."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any, get_type_hints

import msgspec

from async_rl.errors import ConfigError, ToolBroken, ToolError
from async_rl.runtime.loading import load_object
from async_rl.runtime.printable import as_json, without_surrogates
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.supervision import contained, finished
from async_rl.runtime.threads import call_in_thread, start_in_thread
from async_rl.runtime.waits import waiting
from async_rl.types import Task

log = logging.getLogger(__name__)

_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example|Examples|Note|Notes|Source):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^ *(\w+)(?: *\([^)]*\))?: *(.+)$")
_PLAIN_DEFAULTS = (str, int, float, bool, type(None))
_CLEAN_UP_S = 5.0
"""How long an async tool may release what it holds after it was cancelled."""
_BLAMES_THE_CALL = (ToolError, ValueError, ArithmeticError, LookupError, TypeError, OSError)
"""What a tool raises because of its arguments; anything else is a fault of the tool itself."""
_RELEASE_S = 10.0
"""How long a trajectory that has ended waits for a sync `create`, and then for the release of its state."""


class Tool:
    """A function that the policy may call: its name, its JSON schema, and a checked call with a time limit.

    The schema comes from the signature, the descriptions come from the docstring (Google style). Parameters
    may have any type that msgspec can convert: numbers, strings, `Literal`, lists, dicts, Structs.

    Example:
        >>> def weather(city: str, days: int = 1) -> str:
        ...     '''Forecast the weather.
        ...
        ...     Args:
        ...         city: Name of the city.
        ...         days: How far ahead.
        ...     '''
        ...     return f"{city}: rain for {days} days"
        >>> await Tool(weather).call({"city": "Oslo", "days": 2}, timeout_s=5)
        'Oslo: rain for 2 days'

    Args:
        function: A sync function, which runs in a thread, or an async one. Every parameter needs a type
            annotation.

    Raises:
        ConfigError: The function cannot be described to a model.
    """

    keeps_state = False
    """Whether the tool has a state for each trajectory, from `create` to `release`."""

    timeout_s: float | None = None
    """The tool's own limit of a call; None takes `rollout.tool_timeout_s`. The config's entry is first."""

    shared: AbstractAsyncContextManager[Any] | None = None
    """What all trajectories share, entered for the whole run."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.name: str = name or function.__name__
        self._function = function
        self.description, parameter_docs = _read_docstring(function, self.name)
        self._arguments_type = _arguments_type(function, self.name, parameter_docs, given=self.keeps_state)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": _object_schema(self._arguments_type),
            },
        }

    async def create(self, task: Task) -> Any:
        """Make the state that the calls of one trajectory share; a plain function has none."""

    async def release(self, state: Any) -> None:
        """Release the state that `create` made."""

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, state: Any = None) -> str:
        """Check the arguments, run the function, and return its result as text (JSON unless it is a string).

        A sync function that times out keeps its thread until it returns; its result is discarded.

        Args:
            arguments: The arguments as the policy wrote them.
            timeout_s: The longest run.
            state: The state that `create` made, if the tool `keeps_state`.

        Raises:
            ToolError: The arguments are wrong, the function raised, or it timed out.
            ToolBroken: The function says that the tool itself does not work.
        """
        try:
            checked = msgspec.convert(dict(arguments), self._arguments_type)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: wrong arguments: {error}") from error
        values = {field: getattr(checked, field) for field in checked.__struct_fields__}
        try:
            async with (
                serving_timeout(timeout_s) as deadline,
                waiting("tool", self.name, scope=deadline),
            ):
                given = (state,) if self.keeps_state else ()
                result = await _run(partial(self._function, *given, **values), f"tool-{self.name}")
        except ToolBroken:
            raise
        except ToolError as error:
            raise ToolError(f"{self.name}: {error}") from error
        except TimeoutError as error:
            if deadline.expired():
                raise ToolError(f"{self.name}: no result within {timeout_s:g} s") from error
            raise ToolError(f"{self.name}: {_describe(error)}") from error
        except Exception as error:  # the tool's own code may raise anything
            failure = ToolError(f"{self.name}: {_describe(error)}")
            if not isinstance(error, _BLAMES_THE_CALL):
                failure.failure_kind = "tool_broken"
            raise failure from error
        return _as_text(self.name, result)


class StatefulTool(Tool):
    """A tool made of a class: one object per run, and one state per trajectory.

    The class has `execute(self, state, …)`, whose signature and docstring describe the tool to the policy. It
    may have `create(self, task)` and `release(self, state)`. Each method is sync (and runs in a thread) or
    async. The state is made before the trajectory's first call and released at its end, even if the
    trajectory is cancelled or times out; calls of one trajectory run one after the other. Without `create`
    there is no state, and `execute` has no parameter for it.

    An attribute `timeout_s` is the time limit of its calls in place of `rollout.tool_timeout_s`. A class that
    is an async context manager is entered before the first trajectory and exited at the end of the run.

    Example:
        >>> class Notebook:
        ...     name = "note"  # else the class's: `notebook`
        ...
        ...     def __init__(self, max_notes: int = 10):  # from `args` in the config, once a run
        ...         self.max_notes = max_notes
        ...
        ...     def create(self, task):
        ...         return []
        ...
        ...     def execute(self, state, text: str) -> str:
        ...         '''Write a note down.'''
        ...         state.append(text)
        ...         return f"{len(state)} notes"
        >>> await StatefulTool(Notebook()).call({"text": "Buy milk."}, timeout_s=5, state=[])
        '1 notes'

    Raises:
        ConfigError: The class cannot be described to a model.
    """

    def __init__(self, thing: Any, *, name: str | None = None) -> None:
        self._thing = thing
        self.timeout_s = getattr(thing, "timeout_s", None)
        self.shared = thing if isinstance(thing, AbstractAsyncContextManager) else None
        self.keeps_state = hasattr(thing, "create")
        if hasattr(thing, "release") and not self.keeps_state:
            raise ConfigError(
                f"tool {type(thing).__name__!r} has `release` but no `create`: add one that makes the state"
            )
        own = getattr(thing, "name", None) or re.sub(r"(?<!^)(?=[A-Z])", "_", type(thing).__name__).lower()
        super().__init__(thing.execute, name=name or own)

    async def create(self, task: Task) -> Any:
        """Implements `Tool.create`; what it makes although it is cancelled is released."""
        create, loop = self._thing.create, asyncio.get_running_loop()
        if is_async := inspect.iscoroutinefunction(create):
            made = loop.create_future()

            async def make() -> None:
                made.set_result(await create(task))

            making: Awaitable[Any] = contained(make(), limit_s=_CLEAN_UP_S)
        else:
            made = start_in_thread(partial(create, task), name=f"create-{self.name}")
            making = asyncio.shield(made)  # its thread runs on
        try:
            await making
        except asyncio.CancelledError:
            if made.done() or not is_async:
                await finished(self._release_late(made), limit_s=3 * _RELEASE_S)
            raise
        return made.result()

    async def release(self, state: Any) -> None:
        """Implements `Tool.release`."""
        if hasattr(self._thing, "release"):
            await _run(partial(self._thing.release, state), f"release-{self.name}")

    async def _release_late(self, made: asyncio.Future[Any]) -> None:
        """Release the state of a cancelled `create` once it is made; wait at most `_RELEASE_S` for that."""
        with waiting("clean-up", limit_s=_RELEASE_S):
            await asyncio.wait([made], timeout=_RELEASE_S)
        if not made.done():
            log.warning(
                "tool %s: create still runs %g s after its cancellation; its state is released when it ends",
                self.name,
                _RELEASE_S,
            )
            made.add_done_callback(
                lambda made: asyncio.run_coroutine_threadsafe(self._release_late(made), made.get_loop())
            )
        elif made.exception() is None:
            try:
                async with asyncio.timeout(_RELEASE_S):
                    await self.release(made.result())
            except Exception as error:  # the tool's own code may raise anything
                log.warning("tool %s: release failed: %s", self.name, _describe(error))


def load_tool(path: str, args: Mapping[str, Any] | None = None, *, name: str | None = None) -> Tool:
    """Load the tool at a dotted path: a function, a class with `execute`, or a `Tool`.

    Args:
        path: `module:attribute`.
        args: Keyword arguments of the class.
        name: The name for the policy; its own name by default.

    Raises:
        ConfigError: It does not exist, or cannot be described to a model.
    """
    value = load_object(path, what="tool")
    if inspect.isclass(value) and hasattr(value, "execute"):
        try:
            return StatefulTool(value(**(args or {})), name=name)
        except TypeError as error:
            raise ConfigError(
                f"tool {path!r} cannot be made with args = {dict(args or {})}: {error}"
            ) from error
    if args:
        raise ConfigError(
            f"tool {path!r} is not a class with `execute`, so it takes no args; found {list(args)}"
        )
    if isinstance(value, Tool):
        return value
    if not inspect.isroutine(value):
        raise ConfigError(
            f"tool {path!r} is {type(value).__name__}; expected a function, a class with `execute`, or a Tool"
        )
    return Tool(value, name=name)


async def _run(function: Callable[[], Any], name: str) -> Any:
    """Call a sync function in a thread, or an async one directly."""
    inner = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(inner):
        return await contained(function(), limit_s=_CLEAN_UP_S)
    return await call_in_thread(function, name=name)


def _arguments_type(
    function: Callable[..., Any], name: str, docs: Mapping[str, str], *, given: bool
) -> type[msgspec.Struct]:
    """Return a strict Struct with the function's parameters; `given`: the first one is the state."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name!r}: an annotation cannot be resolved: {error}") from error
    fields: list[Any] = []
    parameters = list(inspect.signature(function).parameters.values())
    if given and not parameters:
        raise ConfigError(f"tool {name!r} has `create`, so its `execute` needs a parameter for the state")
    for parameter in parameters[1:] if given else parameters:
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not named or parameter.name not in hints:
            raise ConfigError(
                f"tool {name!r}: parameter {str(parameter)!r} must be a named one with a type "
                "annotation, because the schema contains its type"
            )
        hint = hints[parameter.name]
        if (text := docs.get(parameter.name) or _annotated_text(hint)) is not None:
            hint = Annotated[hint, msgspec.Meta(description=text)]
        fields.append((parameter.name, hint, *_default(parameter)))
    arguments_type = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    return arguments_type


def _annotated_text(hint: Any) -> str | None:
    """Return the description in `Annotated[int, "how many"]`, as other libraries use it."""
    return next((text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)), None)


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


def _read_docstring(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its parameters."""
    docstring = inspect.getdoc(function) or ""
    parts = _SECTION.split(docstring)
    description = " ".join(parts[0].split())
    if not description:
        raise ConfigError(
            f"tool {name!r} has no docstring; expected one, because the policy needs a description"
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
        return without_surrogates(result)
    try:
        return as_json(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"{name}: the result is not JSON: {error}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
