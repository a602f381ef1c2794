"""Define a request's chat options.

Derive the format and the grammar of replies from the options and the chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.errors import InvalidRequest

from .chat_template import ChatTemplate, Message, Rendered
from .derivation.probes import SWITCHES
from .derivation.reply_markup import ReplyMarkup
from .formats.call_grammar import CallGrammar, OfferedTool, Prepare, ReasoningTags, TextConstraint
from .formats.call_reader import ToolReader
from .formats.channels import END
from .reply_reader import ReplyFormat


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of a chat request. `tools` uses OpenAI's format."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    enable_thinking: bool | None = None  # None: the template decides
    thinking_budget: int | None = None  # tokens
    template_args: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None  # the content of a system message before all others
    parallel_tool_calls: bool | None = None  # False: at most one call; True: several, even if a call is forced
    allowed_tools: Sequence[str] | None = None  # names of tools that may be called; None: all tools
    chat_template: str | None = None  # a Jinja template that replaces the model's own
    add_generation_prompt: bool = True  # whether the prompt starts a reply after the last message
    continue_final_message: bool | None = None  # None: a final message of the assistant is continued, if it has text

    def all_of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, preceded by the system message from the options if there is one.

        Raises InvalidRequest if the messages and the options both contain a system message.
        """
        if self.system is None:
            return messages
        if messages and messages[0].get("role") == "system":
            raise InvalidRequest("system: the messages already start with a system message; remove one of them")
        return [{"role": "system", "content": self.system}, *messages]

    def started_reply(self, messages: Sequence[Message]) -> str:
        """Return the text that the reply continues, which is the content of a final assistant message.

        The text is empty if the reply doesn't continue such a message. Raises InvalidRequest if the caller requires a
        continuation but the last message has no text to continue.
        """
        last = messages[-1] if messages else {}
        content = last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None
        text = content if isinstance(content, str) and content.strip() else ""
        if self.continue_final_message and not text:
            raise InvalidRequest(
                "continue_final_message is true, but the last message is not an assistant message with text; add "
                "the text to continue"
            )
        continues = self.add_generation_prompt if self.continue_final_message is None else self.continue_final_message
        return text if continues else ""

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the template shows to the model."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def callable(self) -> list[OfferedTool]:
        """The tools that the model may call.

        Raises InvalidRequest if the options name an unknown tool or contradict each other.
        """
        functions = [tool["function"] for tool in self.tools]
        names = [function["name"] for function in functions]
        all_names = f"the tools are: {', '.join(sorted(names)) or 'none'}"
        allowed = names if self.allowed_tools is None else list(self.allowed_tools)
        for name in allowed:
            if name not in names:
                raise InvalidRequest(f"allowed_tools: {name!r} is not a tool of this request; {all_names}")
        if not allowed and self.allowed_tools is not None:
            raise InvalidRequest("allowed_tools is empty; name at least one tool, or set tool_choice to 'none'")
        if self.tool_choice not in ("auto", "none", "required"):
            if self.tool_choice not in names:
                raise InvalidRequest(f"tool_choice: {self.tool_choice!r} is not a tool of this request; {all_names}")
            if self.tool_choice not in allowed:
                raise InvalidRequest(
                    f"tool_choice: {self.tool_choice!r} is not one of allowed_tools; add it there, or choose another"
                )
        return [
            OfferedTool(
                name,
                parameters=function.get("parameters") or {},
                strict=function.get("strict") is True,
                where=f"tools.{i}.function.parameters",
            )
            for i, (name, function) in enumerate(zip(names, functions, strict=True))
            if name in allowed
        ]

    @property
    def forces_call(self) -> bool:
        """True if the model must reply with a tool call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def variables(self) -> dict[str, Any]:
        """The template variables, except the messages.

        Raises InvalidRequest if `template_args` sets a reserved name.
        """
        reserved = {"messages", "tools", "add_generation_prompt"} & self.template_args.keys()
        if reserved:
            raise InvalidRequest(
                f"template_args contains {', '.join(sorted(reserved))}; pass each as a separate parameter"
            )
        variables = {**self.template_args, "tools": self.offered}
        if self.enable_thinking is None:
            return variables
        return {
            **dict.fromkeys(SWITCHES, self.enable_thinking),
            **variables,
            "enable_thinking": self.enable_thinking,
        }


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation's prompt and the format of its reply."""

    text: str
    tokens: list[int]
    reply: ReplyFormat
    lark: str | None = None  # a grammar of the whole reply, which includes the caller's schema or regular expression
    warnings: tuple[str, ...] = ()  # parts of the tools' schemas that are not enforced

    @property
    def sampling(self) -> dict[str, str | None]:
        """The sampling parameters that set the reply's grammar and override the caller's parameters."""
        return {} if self.lark is None else {"json_schema": None, "regex": None, "grammar": None, "lark": self.lark}


def reply_format_of(
    name: str, template: ChatTemplate, prompt: Rendered, options: ChatOptions, ids_of: Callable[[str], list[int]]
) -> ReplyFormat:
    """Return the format of the reply to a prompt.

    `ids_of` tokenizes markup, including special tokens. Raises InvalidRequest if the chat template of model `name` does
    not support an option.
    """
    markup = template.reply_markup
    opening, closing = markup.think_open, END if markup.channels else markup.think_close
    if options.thinking_budget is not None and not closing:
        raise InvalidRequest(
            f"thinking_budget is {options.thinking_budget}, but the chat template of model {name!r} does not support "
            "reasoning; remove thinking_budget, or choose a reasoning model"
        )
    if options.offered and not template.supports_tools:
        raise InvalidRequest(
            f"tools: the chat template of model {name!r} does not support tools; choose a model that was trained to "
            "call them"
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
    """Return a reader for calls to the offered tools, or None if no tools are offered or the call format is unknown."""
    if not options.offered or markup.calls is None:
        return None
    parameters = {tool.name: tool.parameters for tool in options.callable}
    return ToolReader(markup.calls, parameters, only_one=options.parallel_tool_calls is False)


def grammar_of_calls(
    name: str, format_: ReplyFormat, options: ChatOptions, prepare: Prepare, constraint: TextConstraint | None = None
) -> CallGrammar | None:
    """Return the grammar of a reply that may contain tool calls, or None if nothing needs to be enforced.

    `constraint` is the request's constraint on the text. If the caller sets `grammar` or `lark`, that grammar
    constrains the whole reply, so the reply contains no tool calls. Raises InvalidRequest if a forced call can't be
    enforced.
    """
    tools, offered = format_.tools, options.callable
    if options.forces_call:
        if constraint is not None:
            raise InvalidRequest(
                f"tool_choice forces a tool call, which can't be combined with {constraint.kind}; remove one of them"
            )
        if options.tool_choice != "required":
            offered = [tool for tool in offered if tool.name == options.tool_choice]
        if not offered:
            raise InvalidRequest("tool_choice is 'required', but no tools are given; add at least one tool")
        if tools is None or not tools.format.can_be_forced:
            raise InvalidRequest(
                f"tool_choice: the tool call format of model {name!r} is not fully known, so calls can't be forced; "
                "use 'auto'"
            )
    elif (
        tools is None
        or not tools.format.can_be_forced
        or (constraint is not None and constraint.kind not in ("json_schema", "regex"))
    ):
        return None
    several = options.parallel_tool_calls is True if options.forces_call else options.parallel_tool_calls is not False
    opens_reasoning = not (format_.starts_thinking or format_.channels)
    return CallGrammar(
        tools.format,
        offered,
        prepare,
        {text.decode(): token for token, text in format_.visible},
        several=several,
        forced=options.forces_call,
        reasoning=ReasoningTags(format_.think_open, format_.think_close) if opens_reasoning else ReasoningTags(),
        constraint=constraint,
    )
