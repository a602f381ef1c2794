"""Chat templates: messages → the prompt text that the model was trained on."""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.errors import InvalidRequest, TemplateFailed

from .derivation.probes import SWITCHES, probes
from .derivation.reply_markup import ReplyMarkup, derive_markup
from .formats.call_grammar import CallGrammar, Offered, Prepare, Thoughts, WantedText
from .formats.call_reader import ToolReader
from .formats.channels import END, MARKUP
from .markup import SpecialToken
from .reply_format import ReplyFormat
from .template_renderer import TemplateProcess

log = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt with its control tokens as text, and `marked`: which of it is the template's own (see markup.py)."""

    text: str
    marked: str


class ChatTemplate:
    """A model's own Jinja template. Rendering is safe from any thread, and bounded in time and memory.

    It runs in a process of its own, which ends with `close`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        specials: Iterable[SpecialToken] = (),
        ends: Iterable[str] = (),
        mark: bool = True,
    ) -> None:
        """Compile the template. Raises TemplateFailed.

        `specials` are the vocabulary's special tokens, and `ends` the texts of those that end a reply. With `mark`
        prompts show which characters come from the caller.
        """
        specials = list(specials)
        self._control = {special.text: special.id for special in specials if special.is_control}
        self.source = source
        self.markup = frozenset(
            special.text
            for special in specials
            if not special.is_control and special.text.strip() and special.text in source
        )
        self._ends = {text for text in (*ends, eos) if text}
        self._mark = mark
        setup = {
            "source": source,
            "bos": bos,
            "eos": eos,
            "control": list(self._control),
            "markup": sorted(self.markup),
        }
        self._process = TemplateProcess(setup)

    def render(
        self,
        /,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> Rendered:
        """Return the prompt of a conversation. Raises TemplateFailed, InvalidRequest.

        Messages are in the OpenAI format; an assistant's may have `reasoning`. `template_args` are the template's own
        variables, for instance `enable_thinking`.
        """
        variables = {**template_args, "add_generation_prompt": add_generation_prompt}
        if tools:  # else they are undefined
            variables["tools"] = list(tools)
        has_calls = any(message.get("tool_calls") for message in messages)
        as_text = has_calls and self.reply_markup.arguments_as_text
        known = [for_template(message, arguments_as_text=as_text) for message in messages]
        answer = self._process.ask({"messages": known, "variables": variables, "mark": self._mark})
        return Rendered(answer["text"], answer["marked"])

    @functools.cached_property
    def reply_markup(self) -> ReplyMarkup:
        """How the template's model writes reasoning and tool calls.

        It is derived once, from conversations that the template renders within the time of one. If that takes longer,
        nothing is known.
        """
        try:
            rendered = self._process.texts_of(probes(for_template))
        except TemplateFailed as error:
            log.warning(
                "chat template: can't derive how this model writes reasoning and tool calls: %s; they stay text", error
            )
            rendered = {}
        return derive_markup(rendered, self.source, self._ends)

    @functools.cached_property
    def thinking_tokens(self) -> tuple[tuple[int, bytes], ...]:
        """The control tokens around reasoning, and their text."""
        markup = self.reply_markup
        return self._control_in(MARKUP if markup.channels else (markup.think_open, markup.think_close))

    @functools.cached_property
    def call_tokens(self) -> tuple[tuple[int, bytes], ...]:
        """The control tokens in tool calls, and their text."""
        calls = self.reply_markup.calls
        return self._control_in(calls.literals if calls is not None else ())

    def _control_in(self, texts: Iterable[str]) -> tuple[tuple[int, bytes], ...]:
        joined = "\n".join(texts)
        return tuple((token, text.encode()) for text, token in self._control.items() if text and text in joined)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.close()


def for_template(message: Any, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """Return a message as templates expect it. Raises InvalidRequest.

    The content is text. The arguments of calls are an object, or JSON. Reasoning has its usual names.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message is {type(message).__name__}; it must be an object with role and content")
    known = {name: value for name, value in message.items() if value is not None and name != "signature"}
    known.setdefault("content", "")
    reasoning = known.pop("reasoning", None)
    if reasoning is not None:
        known["reasoning_content"] = known["thinking"] = reasoning
    if "tool_calls" in known:
        known["tool_calls"] = [_call_for_template(call, arguments_as_text) for call in known["tool_calls"]]
    return known


def _call_for_template(call: Any, arguments_as_text: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequest("a tool call has no function; give it one with a name and arguments")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"the arguments of tool call {function.get('name')!r} are not valid JSON; a call that max_tokens cut "
                "can't be sent back, so leave it out"
            ) from None
    if arguments_as_text and "arguments" in function:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    kept = {name: value for name, value in call.items() if name != "partial"}
    return {"type": "function", **kept, "function": function}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a reply is requested. `tools` are in the OpenAI format."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    enable_thinking: bool | None = None  # None: the default of the template
    thinking_budget: int | None = None  # tokens
    template_args: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None  # a system message before all others
    parallel_tool_calls: bool | None = None  # False: one call at most. True: also several where a call is forced
    allowed_tools: Sequence[str] | None = None  # names of the tools that may be called; None: all of them

    def all_of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages after the system message. Raises InvalidRequest if they start with one already."""
        if self.system is None:
            return messages
        if messages and messages[0].get("role") == "system":
            raise InvalidRequest("system is given, and the messages also start with a system message; leave one out")
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the template shows to the model."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def callable(self) -> list[Offered]:
        """The tools that may be called. Raises InvalidRequest for an unknown name."""
        functions = [tool["function"] for tool in self.tools]
        names = [function["name"] for function in functions]
        known = f"the tools are: {', '.join(sorted(names)) or 'none'}"
        allowed = names if self.allowed_tools is None else list(self.allowed_tools)
        for name in allowed:
            if name not in names:
                raise InvalidRequest(f"allowed_tools: {name!r} is not a tool of this request; {known}")
        if not allowed and self.allowed_tools is not None:
            raise InvalidRequest("allowed_tools is empty; name at least one tool, or set tool_choice to none")
        if self.tool_choice not in ("auto", "none", "required"):
            if self.tool_choice not in names:
                raise InvalidRequest(f"tool_choice: {self.tool_choice!r} is not a tool of this request; {known}")
            if self.tool_choice not in allowed:
                raise InvalidRequest(
                    f"tool_choice: {self.tool_choice!r} is not one of allowed_tools; add it there, or choose another"
                )
        return [
            Offered(
                name,
                parameters=of.get("parameters") or {},
                strict=of.get("strict") is True,
                where=f"tools.{i}.function.parameters",
            )
            for i, (name, of) in enumerate(zip(names, functions, strict=True))
            if name in allowed
        ]

    @property
    def forces_call(self) -> bool:
        """Whether the reply must be a call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the template in addition to the messages. Raises InvalidRequest."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        by_other_names = {} if self.enable_thinking is None else dict.fromkeys(SWITCHES, self.enable_thinking)
        taken = {"messages", "tools", "add_generation_prompt"} & self.template_args.keys()
        if taken:
            raise InvalidRequest(f"template_args has {', '.join(sorted(taken))}; give each as a parameter of its own")
        return {**by_other_names, **self.template_args, **thinking, "tools": self.offered}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the engine."""

    text: str
    tokens: list[int]
    reply: ReplyFormat
    lark: str | None = None  # a grammar of the whole reply, which replaces a schema or a regular expression
    warnings: tuple[str, ...] = ()  # what the tools ask for and is not enforced

    @property
    def sampling(self) -> dict[str, str | None]:
        """The sampling parameters that the grammar of the reply needs; they replace those of the caller."""
        return {} if self.lark is None else {"json_schema": None, "regex": None, "grammar": None, "lark": self.lark}


def after_reply(messages: Sequence[Message], render: Callable[[list[Message]], Rendered]) -> Rendered:
    """Return what a template writes after a reply if these messages follow. Raises TemplateFailed, InvalidRequest.

    The template renders a conversation whose reply is a random word, and everything after this word is the result.
    """
    if not messages:
        raise InvalidRequest("messages is empty; with a parent_key, give those that follow its reply")
    reply = f"reply{secrets.token_hex(16)}"
    turns: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": reply}, *messages]
    refused = TemplateFailed(
        "the chat template does not show a reply as it was, so nothing can be put after one: send the whole "
        "conversation without parent_key"
    )
    for beginning in (
        [],
        [{"role": "system", "content": "."}],
    ):  # some templates reject a system message, others demand one
        try:
            prompt = render([*beginning, *turns])
        except TemplateFailed as error:
            refused = error
            continue
        if prompt.text.count(reply) == 1:
            at = prompt.text.index(reply) + len(reply)
            return Rendered(prompt.text[at:], prompt.marked[at:])
    raise refused


def reply_format_of(
    name: str, template: ChatTemplate, prompt: Rendered, options: ChatOptions, ids_of: Callable[[str], list[int]]
) -> ReplyFormat:
    """Return how the reply to a prompt is marked up. `ids_of` tokenizes markup, including special tokens.

    Raises InvalidRequest for what the model's template does not support.
    """
    markup = template.reply_markup
    opening, closing = markup.think_open, END if markup.channels else markup.think_close
    if options.thinking_budget is not None and not closing:
        raise InvalidRequest(
            f"thinking_budget is {options.thinking_budget}, but the chat template of model {name!r} has no thinking"
        )
    if options.offered and "tools" not in template.source:
        raise InvalidRequest(
            f"the chat template of model {name!r} takes no tools; choose a model that was made for them"
        )
    tools = _tools_of(markup, options)
    return ReplyFormat(
        think_open=opening,
        think_close=closing,
        starts_thinking=bool(opening) and prompt.marked.rstrip().endswith(opening),
        thinking_budget=options.thinking_budget,
        close_tokens=tuple(ids_of(closing)) if closing else (),
        tools=tools,
        channels=markup.channels,
        visible=template.thinking_tokens + (template.call_tokens if tools else ()),
    )


def _tools_of(markup: ReplyMarkup, options: ChatOptions) -> ToolReader | None:
    """Return a reader for calls of the offered tools; None if there are no tools, or their format is unknown."""
    if not options.offered or markup.calls is None:
        return None
    parameters = {tool.name: tool.parameters for tool in options.callable}
    return ToolReader(markup.calls, parameters, only_one=options.parallel_tool_calls is False)


def grammar_of_calls(
    name: str, format_: ReplyFormat, options: ChatOptions, prepare: Prepare, wanted: WantedText | None = None
) -> CallGrammar | None:
    """Return the grammar of a reply in which the model may or must call tools; None if nothing needs to be enforced.

    `wanted` is what the request demands of the text. A grammar of the caller binds the whole reply, so there are no
    calls. Raises InvalidRequest.
    """
    tools, offered = format_.tools, options.callable
    if options.forces_call:
        if wanted is not None:
            raise InvalidRequest(f"tool_choice forces a call, which excludes {wanted.kind}; remove one of them")
        if options.tool_choice != "required":
            offered = [tool for tool in offered if tool.name == options.tool_choice]
        if not offered:
            raise InvalidRequest("tool_choice is 'required', but there are no tools; give some")
        if tools is None or not tools.format.can_be_forced:
            raise InvalidRequest(f"how model {name!r} writes tool calls is not known here; use tool_choice auto")
    elif (
        tools is None
        or not tools.format.can_be_forced
        or (wanted is not None and wanted.kind not in ("json_schema", "regex"))
    ):
        return None
    several = options.parallel_tool_calls is True if options.forces_call else options.parallel_tool_calls is not False
    opens_thoughts = not (format_.starts_thinking or format_.channels)
    return CallGrammar(
        tools.format,
        offered,
        prepare,
        {text.decode(): token for token, text in format_.visible},
        several=several,
        forced=options.forces_call,
        thoughts=Thoughts(format_.think_open, format_.think_close) if opens_thoughts else Thoughts(),
        wanted=wanted,
    )
