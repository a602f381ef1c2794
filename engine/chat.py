"""Chat templates: messages → the prompt text that the model was trained on. Sandboxed: templates come with models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidRequest, TemplateFailed
from .reply import ReplyFormat
from .tool_calls import forced_call_grammar, tool_format_of

Message = Mapping[str, Any]

MAX_REPEATED = 1_000_000  # characters or items that a template may make with `*`
_THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    separators = options.get("separators")
    return json.dumps(
        value,
        indent=indent,
        ensure_ascii=ensure_ascii,
        separators=None if separators is None else tuple(separators),
        default=list,  # what `map` and `select` make
        sort_keys=bool(options.get("sort_keys")),
    )


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also keeps a template from making endless texts."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        counts = [side for side in (left, right) if isinstance(side, int)]
        if (operator == "**" and max(counts, default=0) > 64) or (
            sizes and counts and sizes[0] * counts[0] > MAX_REPEATED
        ):
            raise jinja2.TemplateError(f"{operator} makes too much")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model is trained on and means nothing here."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's own Jinja template. Rendering is safe from any thread."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Compiles the template. Raises TemplateFailed."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals.update(raise_exception=_raise, strftime_now=_now, bos_token=bos, eos_token=eos)
        environment.filters["tojson"] = _to_json
        self.source = source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """The prompt of a conversation, with its special tokens as text. Raises TemplateFailed, InvalidRequest.

        Messages are in the OpenAI form; an assistant's may have `reasoning`. `template_args` are the template's own
        variables, for instance `enable_thinking`.
        """
        try:
            variables = {"tools": list(tools), **template_args} if tools else template_args  # else they are undefined
            return self._template.render(
                messages=[_for_template(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template refused the messages: {error}") from None
        except Exception as error:  # a template is foreign code
            raise TemplateFailed(f"the model's chat template failed on the messages: {error!r}") from None


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text, not nothing; arguments as an object; thoughts under their usual names."""
    known = {name: value for name, value in message.items() if value is not None and name != "signature"}
    known.setdefault("content", "")
    reasoning = known.pop("reasoning", None)
    if reasoning is not None:
        known["reasoning_content"] = known["thinking"] = reasoning
    if "tool_calls" in known:
        known["tool_calls"] = [_call_for_template(call) for call in known["tool_calls"]]
    return known


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(f"the arguments of tool call {function.get('name')!r} are no JSON") from None
    return {"type": "function", **call, "function": function}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a reply is asked for. `tools` are in the OpenAI form."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    enable_thinking: bool | None = None  # None: as the template does it
    thinking_budget: int | None = None  # tokens
    template_args: Mapping[str, Any] = field(default_factory=dict)

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


def reply_format_of(
    name: str, template: ChatTemplate, prompt: str, options: ChatOptions, ids_of: Callable[[str], list[int]]
) -> ReplyFormat:
    """How the reply to a rendered prompt is marked up; `ids_of` tokenizes markup, special tokens included.

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
        starts_thinking=bool(opening) and prompt.rstrip().endswith(opening),
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
