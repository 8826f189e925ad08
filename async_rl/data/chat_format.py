"""Renders conversations as tokens without re-tokenising what the policy wrote.

```
prompt_ids ─► sampled … <end of turn> ─► append_ids ─► sampled … <end of turn> ─► append_ids ─► …
```

Each piece is rendered by the model's own chat template and tokenised separately. The text after an assistant
turn is found by rendering a dummy conversation whose assistant message is a marker: after the marker follow
the end of the turn and everything up to the next generation prompt. Pieces join at special tokens, where
tokenizers split anyway.

The text of messages does not become control tokens (`async_rl.data.control_tokens`): only the template writes
those. A message without the text of a control token has exactly the template's tokens.

| text of | may contain |
|---|---|
| an assistant | tags that a policy writes, such as `<think>` and `<|python_tag|>` |
| system, developer, user, tools' schemas | tags like `<think>` that are not special and delimit no message |
| a tool, or any other role | none |
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from async_rl.data.control_tokens import ControlTokens, has_control_shape
from async_rl.errors import ConfigError
from async_rl.runtime.hub_paths import suggest_hub
from async_rl.runtime.printable import without_surrogates
from async_rl.runtime.time_limit import TimeLimitExceeded, time_limit
from async_rl.types import BoolArray, Int32Array

_TAG = re.compile(r"tool|think|python_tag|arg_(key|value)")
"""Matches special tokens that belong to the text of a turn (Llama 3, Kimi-K2, …); others only delimit it."""
_QUESTION = {"role": "user", "content": "?"}
_RESULT = {"role": "tool", "content": "?", "name": "tool", "tool_call_id": "call00000"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_NAMES_OF_TOOLS = ("TOOLMARKER", "WORDMARKER", "OTHERTOOL", "OTHERWORD")
"""Names of two tools and of their parameters."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": tool,
            "description": "Looks up a word.",
            "parameters": {"type": "object", "properties": {word: {"type": "string"}}, "required": [word]},
        },
    }
    for tool, word in (_NAMES_OF_TOOLS[:2], _NAMES_OF_TOOLS[2:])
]
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of content that hold text, of OpenAI's two APIs."""
_MARKER = "ASSISTANTMARKER"
"""Stands for an assistant message. It is a plain word because templates trim or split whitespace and tags."""
_MENTIONING_ROLES = ("system", "developer", "user")
"""Roles of messages that explain tags to the policy."""
_READ_ROLES = frozenset({*_MENTIONING_ROLES, "tool"})
"""Roles of messages that a policy reads, as all templates know them."""
_TEMPLATE_S: Final = 10.0
"""How long a template may take to render a conversation, which takes milliseconds."""
_NUM_PROMPTS: Final = 32
"""Conversations whose tokens are remembered: siblings, which begin one after the other, have the same one."""
_MAX_PROMPT_BYTES: Final = 1 << 18
"""Longer conversations are not remembered, so that all of them take at most some 16 MB."""


class Tokenizer(Protocol):
    """The part of the Hugging Face tokenizer interface that `ChatFormat` uses."""

    chat_template: Any
    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens added to the vocabulary, by id, with `content`, `special` and `single_word`."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Render a conversation as text."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Convert text to token ids."""
        ...

    def decode(
        self,
        token_ids: list[int] | Int32Array,
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> Any:
        """Convert token ids to text."""
        ...


class _Form(NamedTuple):
    """The form in which a template renders content and calls; others look like Python, or are missing."""

    in_parts: Collection[str] = ()
    """Roles whose content is a list of parts instead of text."""
    arguments: Literal["object", "text", "as_given"] = "as_given"
    """The form of a call's arguments."""
    call_content: str | None = ""
    """The content of a message that has calls alone."""

    def of_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in this form.

        Raises:
            ConfigError: Its content is in no known form, and would look like Python.
        """
        formed = dict(message)
        content, calls = message.get("content"), message.get("tool_calls")
        if "content" in message or not calls:
            formed["content"] = content = self._of_content(content, str(message.get("role")))
        if isinstance(calls, list) and calls and self.arguments != "as_given":
            formed["tool_calls"] = [self._of_call(call) for call in calls]
            if not content:
                formed["content"] = self.call_content
        return formed

    def _of_content(self, content: Any, role: str) -> Any:
        texts = _texts_of(content, role)
        if role not in self.in_parts or not any(texts):
            return "".join(texts)
        return [{"type": "text", "text": text} for text in texts]

    def _of_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.arguments == "object" and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                decoded = json.loads(arguments or "{}")
                arguments = decoded if isinstance(decoded, dict) else arguments
        elif self.arguments == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _texts_of(content: Any, role: str) -> list[str]:
    """Return the texts of a message's content; of other parts, such as images, engines would not be told."""
    if type(content) in (int, float):  # as a tool may return, and without True, which is Python's notation
        content = str(content)
    texts: list[str] = []
    for part in content or () if isinstance(content, list | tuple | None) else [content]:
        is_text = isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS
        if not isinstance(text := part.get("text") if is_text else part, str):
            raise ConfigError(
                f"the content of a message of the role {role!r} has {part!r:.60}; expected text, or parts of "
                "text"
            )
        texts.append(text)
    return texts


class ChatFormat:
    """Converts messages to token ids and back, with a tokenizer and its chat template.

    Args:
        tokenizer: A tokenizer with a chat template.
        stop_token_ids: Stop tokens besides the end of turn and the tokenizer's end of sequence.
        trusted_roles: Roles of messages whose text may contain any control token; tools' schemas are part of
            the role `system`.

    Raises:
        ConfigError: The template is missing, cannot be rendered, or follows assistant messages by no special
            token.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), trusted_roles: Collection[str] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; expected `chat_template` in tokenizer_config.json or a "
                "chat_template.jinja beside it (base models have none: use the instruct model's)"
            )
        self.tokenizer = tokenizer
        self._is_probed = False
        self._never_ends: ConfigError | None = None
        """The error of a probe that did not end: the others would not end either."""
        self._tags: dict[int, str] = {}
        self._shown_roles = {"user", "assistant"}
        self._shows_tools = dict[bool, bool]()
        """Whether a prompt shows the tools that it is rendered with: without, or with a system message."""
        added = {
            token.content: (token_id, token) for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        ids = {text: token_id for text, (token_id, token) in added.items() if self._is_control(token)}
        self._control = ControlTokens(ids)
        self._known_prompts = lru_cache(_NUM_PROMPTS)(
            lambda conversation: self._encode_prompt(*marshal.loads(conversation))
        )
        self._keeping = {"": self._control.keeping([])}
        """What the text of messages may contain, by role; other roles are those of the empty name."""
        self._form = self._probe_form()
        self._is_ended_by_next, self._ends = self._find_ends_of_turn()
        self.end_of_turn_ids = tuple(self._ends)
        """The tokens that end a turn of the policy: one, or those with which the next messages begin."""
        stops = {*self._ends, tokenizer.eos_token_id, *stop_token_ids}
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stop for stop in stops if stop is not None))
        self._tags |= {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token_id not in stops and _TAG.search(token.content)
        }
        around = self._written_around_messages()
        mentioned = [
            text
            for text in ids
            if not added[text][1].special and not has_control_shape(text) and text not in around
        ]
        as_mentioned = self._control.keeping(mentioned)
        self._keeping |= dict.fromkeys(_MENTIONING_ROLES, as_mentioned)
        self._keeping["assistant"] = self._control.keeping([*mentioned, *self._tags.values()])
        self._keeping |= dict.fromkeys(trusted_roles, self._control.keeping(ids))
        self._is_probed = True
        if self._never_ends is not None:
            raise self._never_ends

    @property
    def end_of_turn_id(self) -> int:
        """The token that ends a turn of the policy, the first of several."""
        return self.end_of_turn_ids[0]

    @property
    def template(self) -> str:
        """The text of the chat template, or of all templates if the tokenizer has several."""
        template = self.tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)

    def check_tools(self, *, with_system: bool | None = None) -> None:
        """Check that the template shows tools to the policy; DeepSeek-V3's has only tags of their calls.

        Args:
            with_system: Whether the conversation begins with a system message; None if it may.

        Raises:
            ConfigError: It does not.
        """
        shapes = (False, True) if with_system is None else (with_system,)
        if not any(self._can_show_tools(with_system=shape) for shape in shapes):
            where = "" if with_system is None else f" with{'' if with_system else 'out'} a system message"
            raise ConfigError(
                f"the chat template does not show tools in a conversation{where}, so the policy would never "
                "learn of them: take a template that shows them, or describe them in the system message"
            )

    def _can_show_tools(self, *, with_system: bool) -> bool:
        if with_system not in self._shows_tools:
            asked = [_QUESTION] if not with_system else [{"role": "system", "content": "?"}, _QUESTION]
            try:
                rendered = self._apply_template([*map(self._form.of_message, asked)], _TOOLS, True)
            except ConfigError:  # it knows no system messages
                rendered = ""
            self._shows_tools[with_system] = all(name in rendered for name in _NAMES_OF_TOOLS)
        return self._shows_tools[with_system]

    def check_role(self, role: str) -> None:
        """Check that the template shows messages of a role: Qwen's skips unknown ones silently.

        Raises:
            ConfigError: It does not.
        """
        if role in self._shown_roles:
            return
        message = self._form.of_message({**_RESULT, "role": role, "content": _MARKER})
        if not self._shows(message, self._form):
            raise _left_out(role)
        self._shown_roles.add(role)

    def _check_calls_shown(
        self,
        said: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        is_trained: bool = False,
    ) -> None:
        """Check that the template shows the calls of messages, by rendering them with markers as names.

        Args:
            said: The messages, in the template's form.
            tools: The tools of their conversation, which may choose the template.
            is_trained: Whether the text before the last message's calls must be shown, too; Llama's and
                Mistral's templates leave it out of what a policy reads.

        Raises:
            ConfigError: It does not.
        """
        names = dict[str, Any]()
        marked = [_with_marked_calls(message, names) for message in said]
        if not names:
            return
        if is_trained and "tool_calls" in said[-1]:
            content = "".join(_texts_of(said[-1].get("content"), "assistant"))
            before, thought, text = content.rpartition("</think>")
            if text.strip():
                names[_MARKER] = text.strip()
                marked[-1] = self._form.of_message({**marked[-1], "content": before + thought + _MARKER})
        try:
            rendered = self._apply_template(marked, tools, False)
        except ConfigError:  # it knows no such names
            return
        for left_out in (name for marker, name in names.items() if marker not in rendered):
            raise ConfigError(
                f"the chat template leaves out {left_out!r:.60} of an assistant message with tool calls, "
                "so the policy would never see it: take a template that shows them, or write them into the "
                "content"
            )

    def _shows(self, message: dict[str, Any], form: _Form, *, quoted: str = "") -> bool:
        """Return whether the template shows the marker in a message somewhere, without the text `quoted`.

        Args:
            message: The message, rendered as it is.
            form: The form of the messages around it.
            quoted: What the rendered text has where the template prints an object as Python does.
        """
        answer = {"role": "assistant", "content": "?"}
        for around in ([], [_QUESTION], [_QUESTION, answer], [_QUESTION, _call({}, "?")]):
            formed = [form.of_message(each) for each in around]
            for conversation in ([*formed, message], [message, *formed]):
                with suppress(ConfigError):  # it knows no such role, or none there
                    rendered = self._apply_template(conversation, [], False)
                    if _MARKER in rendered and not (quoted and quoted in rendered):
                        return True
        return False

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32Array:
        """Return the tokens of a conversation up to the policy's turn, `[P] int32`, read-only."""
        try:
            # Unlike JSON it tells all types apart, and it refuses other types than Python's own.
            conversation = marshal.dumps((list(messages), list(tools)), 2)
        except ValueError:
            return self._encode_prompt(messages, tools)
        if len(conversation) > _MAX_PROMPT_BYTES:
            return self._encode_prompt(messages, tools)
        return self._known_prompts(conversation)

    def _encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Int32Array:
        token_ids = self.encode(self._render(messages, tools, add_generation_prompt=True))
        token_ids.setflags(write=False)
        return token_ids

    def prompt_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text of `prompt_ids`, at a tenth of its cost, for measuring many prompts."""
        return self._control.unmark(self._render(messages, tools, add_generation_prompt=True))

    def append_ids(self, messages: Sequence[Mapping[str, Any]], *, after_length: bool = False) -> Int32Array:
        """Return the tokens between the policy's last token and the next generation prompt, `[n] int32`.

        All messages between two turns of the policy belong in one call, because templates join adjacent tool
        results.

        Args:
            messages: The messages in between; without any, the policy just writes another turn.
            after_length: Whether the turn ended without its end-of-turn token (by a length limit, a stop
                string, another stop token), so that it must be added.
        """
        after = self.encode(self._append(messages))
        return after if after_length else after[1:]

    def append_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of `append_ids`, which starts with the end of the policy's turn."""
        return self._control.unmark(self._append(messages))

    def _append(self, messages: Sequence[Mapping[str, Any]]) -> str:
        asked = [_QUESTION, {"role": "assistant", "content": _MARKER}, *messages]
        return self._after_marker(self._render(asked, add_generation_prompt=True))

    def decode(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens, without special tokens except the tags of thoughts and tool calls."""
        ids = np.asarray(token_ids, np.int32)
        if self._tags.keys().isdisjoint(ids.tolist()):
            return self._decode(ids)
        pieces: list[str] = []
        run: list[int] = []
        for token_id in ids.tolist():
            if (tag := self._tags.get(token_id)) is None:
                run.append(token_id)
            else:
                pieces += [self._decode(run), tag]
                run = []
        return "".join([*pieces, self._decode(run)])

    def raw_text(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens with all special tokens, in which engines look for stop strings."""
        return self._decode(token_ids, skip_special_tokens=False)

    def _decode(self, token_ids: Sequence[int] | Int32Array, *, skip_special_tokens: bool = True) -> str:
        # As an array: of a list, transformers checks the type of each token.
        with _panics_as_errors():
            text = self.tokenizer.decode(
                np.asarray(token_ids, np.int32),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return str(text)

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        train_on: Collection[int] | None = None,
    ) -> tuple[Int32Array, BoolArray]:
        """Encode a whole conversation as a rollout would have produced it, for supervised training.

        Args:
            messages: The conversation, which ends with an assistant message.
            tools: JSON schemas of the available tools.
            train_on: Indices of the messages that are trained on; None takes all assistant messages.

        Returns:
            Token ids `[T] int32` and loss mask `[T] bool`, which is true for the content of these messages
            and their end-of-turn tokens.
        """
        assistant_indices = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        if not assistant_indices or assistant_indices[-1] != len(messages) - 1:
            raise ConfigError(
                "the conversation does not end with an assistant message, so it teaches nothing"
            )
        trained = frozenset(assistant_indices if train_on is None else train_on)
        pieces: list[Int32Array] = []
        masks: list[BoolArray] = []
        begin = 0
        for index in assistant_indices:
            read = list(self._between(messages, range(begin, index), tools, trained))
            ids = [self.encode(text) for text, _ in read]
            if begin:  # the previous turn contains its end-of-turn token
                ids[0] = ids[0][1:]
            following = messages[index + 1 : next((i for i in assistant_indices if i > index), index + 1)]
            pieces += [*ids, self.encode(self._assistant_text(messages[index], following))]
            counts = [*(counts for _, counts in read), index in trained]
            masks += [np.full(len(piece), c) for piece, c in zip(pieces[-len(counts) :], counts, strict=True)]
            begin = index + 1
        return np.concatenate(pieces), np.concatenate(masks)

    def _between(
        self,
        messages: Sequence[Mapping[str, Any]],
        between: range,
        tools: Sequence[Mapping[str, Any]],
        trained: Collection[int],
    ) -> Iterator[tuple[str, bool]]:
        """Yield the text before an assistant turn in pieces, each with whether it is trained on.

        A marker locates the content of a message that is trained on, or whose role templates may not know.
        """
        marked = [i for i in between if i in trained or messages[i]["role"] not in _READ_ROLES]
        said = [{**messages[i], "content": _marker(i)} if i in marked else messages[i] for i in between]
        text = self._append(said) if between.start else self._render(said, tools, add_generation_prompt=True)
        for i in marked:
            role, content = messages[i]["role"], messages[i].get("content")
            before, found, text = text.partition(_marker(i))
            if not found:
                raise _left_out(role)
            content = self._mark("".join(_texts_of(content, role)), role)
            if i not in trained:
                text = before + content + text
                continue
            end_of_turn = self._ends[self.end_of_turn_id]
            end = end_of_turn if text.startswith(end_of_turn) else ""
            yield before, False
            yield content + end, True
            text = text.removeprefix(end)
        yield text, False

    def _assistant_text(self, message: Mapping[str, Any], following: Sequence[Mapping[str, Any]]) -> str:
        """Return what the policy would have written for this message, with its end-of-turn token."""
        prompt = self._render([_QUESTION], add_generation_prompt=True)
        rendered = self._render([_QUESTION, message], add_generation_prompt=False)
        end_of_turn = self._ends[self.end_of_turn_id]
        if self._is_ended_by_next:
            after = self._append(following or [_QUESTION])
            end_of_turn = next((end for end in self._ends.values() if after.startswith(end)), end_of_turn)
            rendered += end_of_turn
        end = rendered.rfind(end_of_turn)
        if not rendered.startswith(prompt) or end < len(prompt):
            raise ConfigError(
                "the chat template renders an assistant message differently from its own generation prompt: "
                f"{rendered!r} does not continue {prompt!r}"
            )
        self._check_calls_shown([*map(self._form.of_message, (_QUESTION, message))], [], is_trained=True)
        return rendered[len(prompt) : end + len(end_of_turn)]

    def _probe_form(self) -> _Form:
        """Find out in which form the template renders the content of messages and the arguments of calls."""
        form = _Form()
        for role in ("user", "system", "assistant", "tool"):
            message, parts = {**_RESULT, "role": role}, [{"type": "text", "text": _MARKER}]
            if not self._shows({**message, "content": _MARKER}, form) and self._shows(
                {**message, "content": parts}, form, quoted="'text'"
            ):
                form = form._replace(in_parts=(*form.in_parts, role))
        as_object, as_text = {"word": _MARKER}, json.dumps({"word": _MARKER})
        for content in ("", None):
            if self._shows(_call(as_object, content), form, quoted="'word'"):  # as Python would print it
                return form._replace(arguments="object", call_content=content)
            if self._shows(_call(as_text, content), form, quoted='\\"word'):  # encoded twice
                return form._replace(arguments="text", call_content=content)
        return form

    def _find_ends_of_turn(self) -> tuple[bool, dict[int, str]]:
        """Find the tokens that end a turn.

        Returns:
            Whether the next message's first token ends it, as in GLM-4.5, and the tokens with their text.
        """
        turn = [_QUESTION, {"role": "assistant", "content": _MARKER}]
        after = self._after_marker(self._render(turn, add_generation_prompt=False))
        if (end := self._control_token_at_start(after)) is not None:
            return False, dict([end])
        ends = dict[int, str]()
        for message in (_QUESTION, _RESULT):
            with suppress(ConfigError):  # the template knows no such role
                rendered = self._render([*turn, message], add_generation_prompt=False)
                if (end := self._control_token_at_start(self._after_marker(rendered))) is not None:
                    ends.update([end])
        if not ends:
            raise ConfigError(
                f"the chat template ends an assistant message with {after!r}; expected a special token, "
                "at which the policy can stop"
            )
        return True, ends

    def _control_token_at_start(self, text: str) -> tuple[int, str] | None:
        """Return the special token with which a text begins, and the token's text exactly as there."""
        ids = self.encode(text)[:1]
        token = str(
            self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        is_special = bool(len(ids)) and not self.decode(ids)
        return (int(ids[0]), token) if is_special and text.startswith(token) else None

    def _after_marker(self, rendered: str) -> str:
        _, marker, after = rendered.partition(_MARKER)
        if not marker:
            raise ConfigError(
                "the chat template leaves out the content of assistant messages, so turns cannot be joined"
            )
        return after

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation; control tokens that the template did not write are marked."""
        said, known = [self._form.of_message(message) for message in messages], [dict(tool) for tool in tools]
        if known:
            self.check_tools(with_system=bool(said) and said[0].get("role") == "system")
        for message in said:
            self.check_role(str(message.get("role")))
        self._check_calls_shown(said, known)
        plain = without_surrogates(self._apply_template(said, known, add_generation_prompt))
        try:
            marked = [self._mark(message, str(message.get("role"))) for message in said]
            marked_tools = self._mark(known, "system")
        except RecursionError as error:
            raise ConfigError("a message is nested too deeply to be rendered") from error
        if marked == said and marked_tools == known:
            return plain
        rendered = self._apply_template(marked, marked_tools, add_generation_prompt)
        return plain if self._control.find(plain) == self._control.find(rendered) else rendered

    def _mark(self, value: Any, role: str) -> Any:
        return self._control.mark(value, self._keeping.get(role, self._keeping[""]))

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        if self._never_ends is not None:
            raise self._never_ends
        try:
            with time_limit(_TEMPLATE_S):
                rendered = self.tokenizer.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
                )
        except TimeLimitExceeded:
            error = ConfigError(
                f"the chat template has not ended after {_TEMPLATE_S:g} s: look for a loop that never ends"
            )
            if not self._is_probed:
                self._never_ends = error
            raise error from None
        except Exception as failure:  # a template is a program, which may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template cannot render a conversation of roles [{roles}]: {failure}"
            ) from failure
        return str(rendered)

    def encode(self, text: str) -> Int32Array:
        """Convert text to token ids; special tokens are recognised, and none is prepended."""
        return np.asarray(self._control.encode(text, self._tokenize), np.int32)

    def _tokenize(self, text: str) -> list[int]:
        with _panics_as_errors():
            return self.tokenizer.encode(text, add_special_tokens=False)

    def _is_control(self, token: Any) -> bool:
        """Return whether an added token is special, or a tag; others are frequent words."""
        text = token.content
        is_tag = text.startswith(("<", "[")) and (_TAG.search(text) or text in self.template)
        return bool(token.special or is_tag or has_control_shape(text)) and not token.single_word

    def _written_around_messages(self) -> set[str]:
        """Return the control tokens with which the template delimits messages that the policy reads."""
        turn = {"role": "assistant", "content": _MARKER}
        written: set[str] = set()
        for messages in (
            [{"role": "system", "content": "?"}, _QUESTION],
            [_QUESTION, turn, _RESULT, _QUESTION],
        ):
            try:
                rendered = self._render(messages, add_generation_prompt=False)
            except ConfigError:  # the template knows no such role
                continue
            written.update(self._control.find(rendered.rpartition(_MARKER)[2]))
        return written


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise a ConfigError for a panic of the Rust library, which is not even an `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"the tokenizer has failed ({error}): its files may be damaged") from error


def _call(arguments: Any, content: str | None) -> dict[str, Any]:
    """Return a message with a call."""
    function = {"name": "tool", "arguments": arguments}
    calls = [{"id": _RESULT["tool_call_id"], "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _with_marked_calls(message: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Return a message with markers as the names of its calls, put into `names` with what they replace."""

    def marked(call: Any) -> Any:
        called = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(called, Mapping):
            return call
        names[marker := f"CALL{len(names)}MARKER"] = called.get("name")
        renamed = {**called, "name": marker}
        return {**call, "function": renamed} if "function" in call else renamed

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(marked, calls)]} if isinstance(calls, list) else message


def _marker(index: int) -> str:
    """Return a marker that stands for the content of a message."""
    return f"MESSAGE{index}MARKER"


def load_chat_format(model_path: str | Path, trusted_roles: Collection[str] = ()) -> ChatFormat:
    """Load the chat format of a model folder: its tokenizer, template and stop tokens.

    Args:
        model_path: The folder.
        trusted_roles: As for `ChatFormat`; needed by those who render messages.

    Raises:
        ConfigError: There is no tokenizer or no usable chat template.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: there is no folder {str(folder)!r} (looked from {Path.cwd()})"
            f"{suggest_hub(str(folder))}"
        )
    try:
        return ChatFormat(_load_tokenizer(folder), _generation_stop_ids(folder), trusted_roles)
    except ConfigError as error:
        raise ConfigError(f"model.path {str(folder)!r}: {error}") from error


def _left_out(role: str) -> ConfigError:
    return ConfigError(
        f"the chat template leaves out messages of the role {role!r}; expected roles that it knows, as "
        "user and assistant, or a template that knows this one"
    )


def has_tokenizer(model_path: str | Path) -> bool:
    """Return whether a folder has a file of a tokenizer."""
    return any((Path(model_path) / name).is_file() for name in _TOKENIZER_FILES)


def check_same_tokens(policy: Tokenizer, teacher: str | Path) -> None:
    """Check that a teacher has the token ids of the policy, which it is to score.

    Raises:
        ConfigError: With a token that differs.
    """
    ours, theirs = policy.get_vocab(), _load_tokenizer(Path(teacher)).get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            raise ConfigError(
                f"the teacher in {teacher} has another vocabulary than the policy: {token!r} is token "
                f"{number} of the policy and {theirs.get(token, 'none')} of the teacher, whose scores would "
                "be of other text; use models of one family"
            )


def _load_tokenizer(folder: Path) -> Tokenizer:
    if not has_tokenizer(folder):
        raise ConfigError(f"no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    try:
        with _panics_as_errors():
            if (folder / "tokenizer.json").is_file():
                # AutoTokenizer imports torch, which takes seconds; this class does not.
                from transformers import PreTrainedTokenizerFast

                fast: Tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
                return fast
            from transformers import AutoTokenizer

            slow: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            return slow
    except Exception as error:  # tokenizers raises bare Exception, transformers almost anything
        raise ConfigError(f"the tokenizer cannot be read: {' '.join(str(error).split())}") from error


def _generation_stop_ids(folder: Path) -> list[int]:
    """Return the ids in `eos_token_id` of generation_config.json, which may be absent."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        stops = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"generation_config.json is not a JSON object: {error}") from error
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
