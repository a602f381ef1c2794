"""The payloads of jobs: validated where they are made, and again where they are run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    model_validator,
)

from cellama.config import MODEL_ID, limits

from .errors import InvalidJob
from .json_values import check_escapes, check_text, json_text, shorten
from .names import DEFAULT_MODEL, PRIORITY_INTERACTIVE

MAX_PROBLEMS = 8  # that an error tells of


def _check_text(text: str) -> str:
    _check_length(text, limits.MAX_TEXT_CHARS)
    return check_text(text)


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"it has {len(text)} characters, and the limit is {limit}; make it shorter")


def _at_most(limit: int) -> AfterValidator:
    """Text of so many characters."""

    def check(text: str) -> str:
        _check_length(text, limit)
        return text

    return AfterValidator(check)


def _no_more_than(limit: int, what: str) -> BeforeValidator:
    """A list, or an object, with so many entries; looked at before its entries are."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and len(value) > limit:
            raise ValueError(f"these are {len(value)} {what}, and the limit is {limit}; leave some out")
        return value

    return BeforeValidator(check)


def _check_filled(text: str) -> str:
    if not text:
        raise ValueError("it is empty; give it some text")
    return text


def _check_model_id(text: str) -> str:
    if text != DEFAULT_MODEL and not re.fullmatch(MODEL_ID, text):
        raise ValueError("ids of models hold no colon, no spaces and no control characters; name one that is served")
    return text


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _to_texts(value: Any) -> Any:
    value = _to_tuple(value)
    if isinstance(value, list | tuple) and not 1 <= len(value) <= limits.MAX_TEXTS:
        advice = "split them into several jobs" if value else "give at least one"
        raise ValueError(f"these are {len(value)} texts, and one job takes 1 to {limits.MAX_TEXTS}: {advice}")
    return value


def _to_json(value: Any) -> Any:
    return json_text(value, limits.MAX_TEXT_CHARS) if isinstance(value, dict | bool) else value


def _join_parts(value: Any) -> Any:
    """Content in parts, as in the OpenAI API, is their text."""
    if not isinstance(value, list):
        return value
    if len(value) > limits.MAX_PARTS:
        raise ValueError(f"these are {len(value)} parts, and the limit is {limits.MAX_PARTS}; join them")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        raise ValueError("of content in parts only those of type text are taken")
    texts = [part.get("text", "") for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the text of a part must be text")
    return "".join(texts)


def _to_choice(value: Any) -> Any:
    """{"type": "function", "function": {"name": …}} as in the OpenAI API is the name."""
    if not isinstance(value, dict):
        return value
    function = value.get("function")
    return function.get("name") if isinstance(function, dict) else function


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters; whether every keyword of it is understood only matters to a forced call."""
    json_text(schema, limits.MAX_JSON_CHARS)
    if schema and schema.get("type") != "object":
        raise ValueError(f'its type is {schema.get("type")!r}; parameters must be a JSON Schema of type "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(p, dict | bool) for p in properties.values()):
        raise ValueError("its properties must map names to schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise ValueError("required must list names of its properties")
    return schema


def _check_names(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: given twice; names of tools must differ")
    return tools


def _to_pairs(value: Any) -> Any:
    """{"17": -1.5} as in the OpenAI API, or ["17=-1.5"], or pairs."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple):
        raise ValueError('it must map token ids to biases, for instance {"17": -1.5}')
    if len(value) > limits.MAX_BIASES:
        raise ValueError(f"these are {len(value)} tokens, and the limit is {limits.MAX_BIASES}; leave some out")
    return tuple(_to_pair(entry) for entry in value)


def _to_pair(entry: Any) -> tuple[int, float]:
    try:
        given, added = entry.split("=") if isinstance(entry, str) else entry
        token, bias = int(given), float(added)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f'{shorten(entry)} is no token id with a bias; write {{"17": -1.5}} or 17=-1.5') from None
    if isinstance(given, float) or not 0 <= token <= limits.MAX_COUNT:
        raise ValueError(f"{shorten(given)} is no token id; it must be a whole number, 0 or more")
    if not (abs(bias) <= limits.MAX_BIAS or bias == -math.inf):
        raise ValueError(f"{shorten(added)} is no bias; it must be up to {limits.MAX_BIAS:g} either way, or -inf")
    return token, bias


def _to_adapters(value: Any) -> Any:
    """{"pirate": 0.5}, or ["pirate=0.5"], or ["pirate"] for a scale of 1, or pairs."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, dict | list | tuple):
        raise ValueError('it must map names of adapters to scales, for instance {"pirate": 0.5}')
    if len(value) > limits.MAX_ADAPTERS:
        raise ValueError(f"these are {len(value)} adapters, and the limit is {limits.MAX_ADAPTERS}; leave some out")
    entries = list(value.items()) if isinstance(value, dict) else [_to_adapter(entry) for entry in value]
    names = [entry[0] for entry in entries if isinstance(entry, list | tuple) and entry]
    if len({name for name in names if isinstance(name, str)}) < sum(isinstance(name, str) for name in names):
        raise ValueError("an adapter is named twice; give one scale for each")
    return tuple(entries)


def _to_adapter(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    name, equals, scale = entry.rpartition("=")
    try:
        return (name, float(scale)) if equals else (entry, 1.0)
    except ValueError:
        raise ValueError(f"{shorten(entry)} has no number as scale; write NAME, or NAME=0.5") from None


def _check_breaker(text: str) -> str:
    size, limit = len(text.encode()), limits.MAX_DRY_BREAKER_BYTES
    if size > limit:
        raise ValueError(f"it has {size} bytes of UTF-8, and the limit is {limit}; make it shorter")
    return text


_TEXT, _TOKENS = "<text>", "<tokens>"  # tags that pydantic writes into the place of an error; not shown

Text = Annotated[StrictStr, AfterValidator(_check_text)]
FilledText = Annotated[Text, AfterValidator(_check_filled)]
Name = Annotated[FilledText, _at_most(limits.MAX_NAME_CHARS)]
Finite = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # takes whole numbers, too
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_to_pairs)]
Scale = Annotated[Finite, Field(ge=-limits.MAX_ADAPTER_SCALE, le=limits.MAX_ADAPTER_SCALE)]
Adapters = Annotated[tuple[tuple[Name, Scale], ...] | None, BeforeValidator(_to_adapters)]
Texts = Annotated[tuple[FilledText, ...], Field(fail_fast=True), BeforeValidator(_to_texts)]
Stops = Annotated[
    tuple[Annotated[FilledText, _at_most(limits.MAX_STOP_CHARS)], ...],
    _no_more_than(limits.MAX_STOPS, "texts"),
    BeforeValidator(_to_tuple),
]
Breakers = Annotated[
    tuple[Annotated[FilledText, AfterValidator(_check_breaker)], ...],
    _no_more_than(limits.MAX_DRY_BREAKERS, "texts"),
    BeforeValidator(_to_tuple),
]
Penalty = Annotated[Finite, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Count = Annotated[StrictInt, Field(le=limits.MAX_COUNT)]


class _Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Job(_Payload):
    model: Annotated[Name, AfterValidator(_check_model_id), Field(description="id of the model, or :default")]
    priority: StrictInt = Field(default=PRIORITY_INTERACTIVE, ge=0, le=9, description="0 = most urgent, 9 = least")
    timeout: Finite | None = Field(default=None, gt=0, le=limits.MAX_TIMEOUT_S, description="seconds from submission")


class _GenerationJob(_Job):
    max_tokens: Count = Field(default=256, ge=1, description="tokens to generate at most")
    temperature: Finite = Field(default=0.8, ge=0, le=limits.MAX_TEMPERATURE, description="0 = greedy")
    top_k: Count = Field(default=40, ge=0, description="candidates kept; 0 = all")
    top_p: Finite = Field(default=0.95, gt=0, le=1, description="probability mass kept")
    min_p: Finite = Field(default=0.05, ge=0, le=1, description="least probability relative to the best")
    typical_p: Finite = Field(default=1.0, gt=0, le=1, description="mass kept of typical tokens; 1 = off")
    seed: StrictInt | None = Field(default=None, ge=0, le=limits.MAX_SEED, description="same seed, same text")
    repeat_penalty: Finite = Field(
        default=1.0, ge=limits.MIN_REPEAT_PENALTY, le=limits.MAX_REPEAT_PENALTY, description="1 = off"
    )
    frequency_penalty: Penalty = Field(default=0.0, description="taken off per occurrence; 0 = off")
    presence_penalty: Penalty = Field(default=0.0, description="taken off once a token occurred; 0 = off")
    repeat_last_n: StrictInt = Field(
        default=64, ge=0, le=limits.MAX_LOOK_BACK, description="tokens the penalties look back on"
    )
    logit_bias: LogitBias = Field(default=(), description="TOKEN=BIAS added to its logit; several are allowed")
    dry_multiplier: Finite = Field(
        default=0.0, ge=0, le=limits.MAX_PENALTY, description="DRY, against repeated sequences; 0 = off"
    )
    dry_base: Finite = Field(
        default=1.75, gt=0, le=limits.MAX_DRY_BASE, description="DRY: growth of the penalty per token; below 1 = off"
    )
    dry_allowed_length: Count = Field(default=2, ge=0, description="DRY: repeated tokens that are free")
    dry_penalty_last_n: StrictInt = Field(
        default=-1, ge=-1, le=limits.MAX_LOOK_BACK, description="DRY: tokens looked back on; -1 = all"
    )
    dry_sequence_breakers: Breakers = Field(
        default=("\n", ":", '"', "*"), description="DRY: text that a repetition does not cross"
    )
    xtc_probability: Finite = Field(default=0.0, ge=0, le=1, description="XTC: how often top choices go; 0 = off")
    xtc_threshold: Finite = Field(default=0.1, ge=0, le=1, description="XTC: probability of a top choice")
    mirostat: StrictInt = Field(default=0, ge=0, le=2, description="1 or 2 keep the surprise steady; 0 = off")
    mirostat_tau: Finite = Field(
        default=5.0, gt=0, le=limits.MAX_MIROSTAT_TAU, description="mirostat: wanted surprise in bits"
    )
    mirostat_eta: Finite = Field(
        default=0.1, gt=0, le=limits.MAX_MIROSTAT_ETA, description="mirostat: how fast it follows"
    )
    grammar: Annotated[FilledText, _at_most(limits.MAX_GRAMMAR_CHARS)] | None = Field(
        default=None, description="GBNF that the text must follow, or @FILE"
    )
    grammar_root: Name = Field(default="root", description="the rule that the grammar begins with")
    json_schema: Annotated[
        Annotated[FilledText, _at_most(limits.MAX_SCHEMA_CHARS), AfterValidator(check_escapes)] | None,
        BeforeValidator(_to_json),
    ] = Field(default=None, description="JSON Schema that the text must follow, or @FILE")
    logprobs: StrictInt | None = Field(
        default=None, ge=0, le=limits.MAX_LOGPROBS, description="report so many alternatives per token"
    )
    n: StrictInt = Field(default=1, ge=1, le=limits.MAX_COMPLETIONS, description="completions of the one prompt")
    stop: Stops = Field(default=(), description="text that ends the generation; several are allowed")
    cache_prompt: StrictBool = Field(default=True, description="share prefixes with other requests")
    cache_scope: Annotated[Text, _at_most(limits.MAX_NAME_CHARS)] = Field(
        default="", description="share prefixes only within this scope"
    )
    adapters: Adapters = Field(
        default=None, description="LoRA adapters, NAME or NAME=SCALE, instead of the model's own; NAME=0 for none"
    )
    ignore_eos: StrictBool = Field(default=False, description="go on where the model would end")
    stream: StrictBool = Field(default=True, description="publish the text token by token")

    @model_validator(mode="after")
    def _check_reported(self) -> _GenerationJob:
        count = 0 if self.logprobs is None else self.n * self.max_tokens * (self.logprobs + 1)
        if count > limits.MAX_REPORTED:
            raise ValueError(
                f"logprobs {self.logprobs} for n {self.n} and max_tokens {self.max_tokens} make up to {count} entries, "
                f"and the limit is {limits.MAX_REPORTED}; lower one of them"
            )
        return self


def _text_of_result(value: Any) -> Any:
    """The result of a job, as the step before this one in a chain, is its text."""
    is_result = isinstance(value, dict) and {"text", "finish_reason"} <= value.keys()
    return value["text"] if is_result else value


def _prompt_kind(value: Any) -> str:
    return _TOKENS if isinstance(value, list | tuple) else _TEXT


TokenId = Annotated[StrictInt, Field(ge=0, le=limits.MAX_COUNT)]
TokenList = Annotated[list[TokenId], Field(fail_fast=True), _no_more_than(limits.MAX_PROMPT_TOKENS, "tokens")]
TokenIds = Annotated[TokenList, Field(min_length=1)]
Prompt = Annotated[
    Annotated[FilledText, Tag(_TEXT)] | Annotated[TokenIds, Tag(_TOKENS)],
    Discriminator(_prompt_kind),
    BeforeValidator(_text_of_result),
]


class GenerateJob(_GenerationJob):
    """Text that follows a prompt: text, or token ids."""

    prompt: Prompt


class ToolCallFunction(_Payload):
    """What is called, and with what: a JSON object as text."""

    name: Name
    arguments: Annotated[Text, AfterValidator(check_escapes), BeforeValidator(_to_json)] = "{}"


class ToolCall(_Payload):
    """A call of a tool in an assistant's message, as a result has it."""

    id: Annotated[Text, _at_most(limits.MAX_NAME_CHARS)] | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class Message(_Payload):
    """One turn of a conversation. An assistant's may be the `message` of a result, a tool's is the answer to a call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(_join_parts)] = None
    reasoning: Text | None = None
    signature: Text | None = None
    tool_calls: (
        Annotated[tuple[ToolCall, ...], Field(min_length=1), _no_more_than(limits.MAX_TOOL_CALLS, "tool calls")] | None
    ) = None
    tool_call_id: Annotated[Text, _at_most(limits.MAX_NAME_CHARS)] | None = None
    name: Annotated[Text, _at_most(limits.MAX_NAME_CHARS)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls may have none")
        if self.role != "assistant" and (self.tool_calls or self.reasoning or self.signature):
            raise ValueError(f"a {self.role}'s message has no tool_calls, reasoning or signature")
        return self


class ToolFunction(_Payload):
    """What a model may call; `parameters` is a JSON Schema of type object."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] | None = None
    strict: StrictBool | None = None


class Tool(_Payload):
    """A tool in the OpenAI form."""

    type: Literal["function"]
    function: ToolFunction


def _check_args(value: Any) -> Any:
    if isinstance(value, dict):
        json_text(value, limits.MAX_JSON_CHARS)
    return value


class _Conversation(_Job):
    messages: Annotated[
        tuple[Message, ...], Field(fail_fast=True), Field(min_length=1), _no_more_than(limits.MAX_MESSAGES, "messages")
    ]
    tools: Annotated[tuple[Tool, ...], AfterValidator(_check_names), _no_more_than(limits.MAX_TOOLS, "tools")] = Field(
        default=(), description="what the model may call: JSON list of tools in the OpenAI form"
    )
    tool_choice: Annotated[Name, BeforeValidator(_to_choice)] = Field(
        default="auto", description="auto, none, required, or the name of a tool that must be called"
    )
    enable_thinking: StrictBool | None = Field(default=None, description="let the model think first, or not")
    template_args: Annotated[dict[StrictStr, Any], BeforeValidator(_check_args)] = Field(
        default_factory=dict, description="variables of the model's chat template, as JSON"
    )


class ChatJob(_Conversation, _GenerationJob):
    """The assistant's next turn. `template_args` are variables of the model's chat template."""

    thinking_budget: Count | None = Field(default=None, ge=0, description="tokens for thinking, at most")


class EmbedJob(_Job):
    """One vector per text."""

    texts: Texts
    normalize: StrictBool = Field(default=True, description="vectors of unit length")
    dimensions: Count | None = Field(default=None, ge=1, description="numbers kept of each vector; default: all")
    truncate: StrictBool = Field(default=False, description="cut texts that are too long instead of refusing them")
    encoding: Literal["list", "base64"] = Field(default="list", description="base64 is of little-endian float32")


class RerankJob(_Job):
    """Documents by how well they answer a query."""

    query: FilledText
    documents: Texts
    top_n: Count | None = Field(default=None, ge=1, description="results to return, the best; default: all")
    truncate: StrictBool = Field(default=False, description="cut documents that are too long instead of refusing them")


class TokenizeJob(_Job):
    """The token ids of a text."""

    text: Text
    add_special: StrictBool = Field(default=True, description="with the tokens that begin and end a text")
    parse_special: StrictBool = Field(default=False, description="take the text of special tokens for them")


class DetokenizeJob(_Job):
    """The text of token ids."""

    tokens: TokenList


class ApplyChatTemplateJob(_Conversation):
    """The prompt of a conversation, as text and as token ids."""


Job = TypeVar("Job", bound=_Job)


def parse_job(kind: type[Job], positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Job:
    """The job of a Celery call whose `positional` parameters may be given by position.

    Raises InvalidJob that lists every problem: parameter, value, remedy.
    """
    free = [name for name in positional if name not in kwargs]  # as in `chain(load.s(), generate.s(model="tiny"))`
    names = free if len(args) <= len(free) else positional
    if len(args) > len(names):
        raise InvalidJob(f"{len(args)} positional arguments, at most {len(names)}: {', '.join(names)}")
    values = dict(zip(names, args, strict=False))
    twice = values.keys() & kwargs.keys()
    if twice:
        raise InvalidJob(f"{', '.join(sorted(twice))}: given twice, by position and by name")
    try:
        return kind.model_validate({**values, **kwargs})
    except ValidationError as error:
        told = _tell(error.errors(include_url=False), kind.model_fields)
    # Not within the `except`: as the context of another one, pydantic's error, which Python's garbage collector can't
    # look into, would keep all frames of whoever keeps that one, for good, with the payload.
    raise InvalidJob(told)


def _tell(problems: Sequence[Any], known: Mapping[str, Any]) -> str:
    told = dict.fromkeys(_explain(problem, known) for problem in problems[:MAX_PROBLEMS])
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "; ".join([*told, *more])


def _explain(problem: Any, known: Mapping[str, Any]) -> str:
    where = ".".join(_of_place(part) for part in problem["loc"] if part not in (_TEXT, _TOKENS))
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        name = str(problem["loc"][0])
        close = difflib.get_close_matches(name, list(known), n=1)
        return f"unknown parameter {shorten(name)}; " + (
            f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
        )
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where} is {shorten(problem['input'])}: {message}" if where else message


def _of_place(part: int | str) -> str:
    return shorten(part).strip("'") if isinstance(part, str) else str(part)
