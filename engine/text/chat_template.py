"""Chat templates: messages → the prompt text that the model was trained on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cellama.engine.errors import InvalidRequest, TemplateFailed

from .markup import SpecialToken
from .reply_parser import ReplyFormat
from .template_renderer import TemplateProcess
from .tool_calls import forced_call_grammar, tool_format_of

Message = Mapping[str, Any]

_THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


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
        self, source: str, *, bos: str = "", eos: str = "", specials: Iterable[SpecialToken] = (), mark: bool = True
    ) -> None:
        """Compiles the template. `specials` are the vocabulary's special tokens; `mark` if the caller's text is to be
        told from the template's. Raises TemplateFailed."""
        specials = list(specials)
        control = [special.text for special in specials if special.is_control]
        self.source = source
        self.markup = frozenset(
            special.text
            for special in specials
            if not special.is_control and special.text.strip() and special.text in source
        )
        self._mark = mark
        setup = {"source": source, "bos": bos, "eos": eos, "control": control, "markup": sorted(self.markup)}
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
        """The prompt of a conversation. Raises TemplateFailed, InvalidRequest.

        Messages are in the OpenAI form; an assistant's may have `reasoning`. `template_args` are the template's own
        variables, for instance `enable_thinking`.
        """
        variables = {**template_args, "add_generation_prompt": add_generation_prompt}
        if tools:  # else they are undefined
            variables["tools"] = list(tools)
        answer = self._process.ask({"messages": list(messages), "variables": variables, "mark": self._mark})
        return Rendered(answer["text"], answer["marked"])

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process.close()


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a reply is asked for. `tools` are in the OpenAI form."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    enable_thinking: bool | None = None  # None: as the template does it
    thinking_budget: int | None = None  # tokens
    template_args: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None  # a system message before all others

    def all_of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, behind that of the system. Raises InvalidRequest if they begin with one already."""
        if self.system is None:
            return messages
        if messages and messages[0].get("role") == "system":
            raise InvalidRequest("system is given, and the messages begin with a system's, too; leave one out")
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def variables(self) -> dict[str, Any]:
        """What the template gets beside the messages. Raises InvalidRequest."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        taken = {"messages", "tools", "add_generation_prompt"} & self.template_args.keys()
        if taken:
            raise InvalidRequest(f"template_args has {', '.join(sorted(taken))}; give that as a parameter of its own")
        return {**self.template_args, **thinking, "tools": self.offered}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the engine."""

    text: str
    tokens: list[int]
    reply: ReplyFormat
    grammar: str | None = None  # GBNF of a forced tool call


def after_reply(messages: Sequence[Message], render: Callable[[list[Message]], Rendered]) -> Rendered:
    """What a template writes after a reply, when these messages follow it. Raises TemplateFailed, InvalidRequest.

    The template renders a conversation whose reply is a word that stands nowhere else; what comes behind that is it.
    """
    if not messages:
        raise InvalidRequest("messages is empty; with a parent_key, give those that follow its reply")
    reply = f"reply{secrets.token_hex(16)}"
    turns: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": reply}, *messages]
    refused = TemplateFailed(
        "the chat template does not show a reply as it was, so nothing can be put after one: send the whole "
        "conversation without parent_key"
    )
    for beginning in ([], [{"role": "system", "content": "."}]):  # some can't do with one, some not without
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
    """How the reply to a prompt is marked up; `ids_of` tokenizes markup, special tokens included.

    Raises InvalidRequest for what the model's template has no form for.
    """
    opening, closing = next((tags for tags in _THINKING_TAGS if any(tag in template.source for tag in tags)), ("", ""))
    if options.thinking_budget is not None and not opening:
        raise InvalidRequest(
            f"thinking_budget is {options.thinking_budget}, but the chat template of model {name!r} has no thinking"
        )
    if options.offered and "tools" not in template.source:
        raise InvalidRequest(
            f"the chat template of model {name!r} takes no tools; choose a model that was made for them"
        )
    tools = tool_format_of(template.source) if options.offered else None
    markup = [*filter(None, (opening, closing)), *(tools.markup if tools else ())]
    single = {text: ids[0] for text in markup if len(ids := ids_of(text)) == 1}
    return ReplyFormat(
        think_open=opening,
        think_close=closing,
        starts_thinking=bool(opening) and prompt.marked.rstrip().endswith(opening),
        thinking_budget=options.thinking_budget,
        close_tokens=tuple(ids_of(closing)) if closing else (),
        tools=tools,
        visible=tuple((token, text.encode()) for text, token in single.items()),
    )


def grammar_of_choice(
    name: str, format_: ReplyFormat, options: ChatOptions, to_gbnf: Callable[[str], str]
) -> str | None:
    """GBNF of the call that `tool_choice` forces; None if it forces none. Raises InvalidRequest."""
    if options.tool_choice in ("auto", "none"):
        return None
    functions = [tool["function"] for tool in options.tools]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    if options.tool_choice != "required":
        if options.tool_choice not in schemas:
            known = ", ".join(sorted(schemas)) or "none"
            raise InvalidRequest(f"tool_choice names {options.tool_choice!r}, which is no tool of this job: {known}")
        schemas = {options.tool_choice: schemas[options.tool_choice]}
    if not schemas:
        raise InvalidRequest("tool_choice is 'required', but there are no tools; give some")
    if format_.tools is None:
        raise InvalidRequest(f"how model {name!r} writes tool calls is not known here; use tool_choice auto")
    return forced_call_grammar(format_.tools, schemas, to_gbnf)
