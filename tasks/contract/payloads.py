"""The payloads of jobs: the types of their fields, the messages of a conversation, and the parameters of each job.

Producers validate payloads before they queue a job, and workers validate them again before they run it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

from cellama.config import MODEL_ID, MODEL_ID_RULE, get_settings, limits

from .errors import InvalidJob
from .json_values import check_escapes, check_text, json_text, shorten
from .names import DEFAULT_MODEL, PRIORITY_INTERACTIVE, model_named


@dataclass(frozen=True, slots=True)
class TypedAs:
    """The type of a parameter for callers, as the source text that `tasks/typed_tasks.py` contains.

    Without this annotation, callers pass the field's own type. A payload can also accept other types, for example a
    single string for a list of strings.
    """

    text: str


def _check_text(text: str) -> str:
    _check_length(text, limits.MAX_TEXT_CHARS)
    return check_text(text)


def _check_length(text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"the text has {len(text)} characters, and the limit is {limit}; shorten it")


def at_most(limit: int) -> AfterValidator:
    """Return a validator that limits the number of characters in a string."""

    def check(text: str) -> str:
        _check_length(text, limit)
        return text

    return AfterValidator(check)


def no_more_than(limit: int, items: str) -> BeforeValidator:
    """Return a validator that limits the number of entries in a list or an object, before the entries are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and len(value) > limit:
            raise ValueError(f"there are {len(value)} {items}, and the limit is {limit}; remove some")
        return value

    return BeforeValidator(check)


def _check_filled(text: str) -> str:
    if not text:
        raise ValueError("the text is empty; provide some text")
    return text


def check_model_id(text: str) -> str:
    """Return the id of the model that a name refers to. Raises ValueError."""
    text = model_named(text)
    if text != DEFAULT_MODEL and not re.fullmatch(MODEL_ID, text):
        raise ValueError(f"{MODEL_ID_RULE}; pass the id of a served model")
    return text


def _check_key(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("the value is not a key; pass a result's `finish_key`, which has 64 hexadecimal digits")
    return text


def text_of_result(value: Any) -> Any:
    """Return the text of a result that a chain passes to its next step. Return other values unchanged."""
    is_result = isinstance(value, dict) and {"text", "finish_reason"} <= value.keys()
    return value["text"] if is_result else value


def _key_of_result(value: Any) -> Any:
    """Return the `finish_key` of a result that a chain passes to its next step. Return other values unchanged."""
    return value.get("finish_key", "") if isinstance(value, dict) and "finish_reason" in value else value


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def to_inputs(value: Any) -> Any:
    """Return a tuple of texts. A list of token ids counts as one text."""
    return _to_texts((value,) if isinstance(value, list) and value and isinstance(value[0], int) else value)


def _to_texts(value: Any) -> Any:
    value = _to_tuple(value)
    if isinstance(value, list | tuple) and not 1 <= len(value) <= limits.MAX_TEXTS:
        remedy = "split them into several jobs" if value else "provide at least one"
        raise ValueError(f"there are {len(value)} texts, and a job can have 1 to {limits.MAX_TEXTS}; {remedy}")
    return value


def to_json(value: Any) -> Any:
    return json_text(value, limits.MAX_TEXT_CHARS) if isinstance(value, dict | bool) else value


def join_parts(value: Any) -> Any:
    """Join a list of content parts, as in the OpenAI API, into one string. Return other values unchanged."""
    if not isinstance(value, list):
        return value
    if len(value) > limits.MAX_PARTS:
        raise ValueError(f"there are {len(value)} parts, and the limit is {limits.MAX_PARTS}; join them")
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        raise ValueError("content parts must have type 'text'")
    texts = [part.get("text", "") for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the text of a content part must be a string")
    return "".join(texts)


def to_prediction(value: Any) -> Any:
    """Extract the text from a prediction in the OpenAI format or from a job's result. Return other values unchanged."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"type", "content"} and value["type"] == "content":
        return join_parts(value["content"])
    return text_of_result(value)


def to_choice(value: Any) -> Any:
    """Extract the tool name from a tool choice in the OpenAI format. Return other values unchanged."""
    if not isinstance(value, dict):
        return value
    function = value.get("function")
    return function.get("name") if isinstance(function, dict) else function


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Check the JSON Schema of a tool's parameters, which may contain keywords that can't be enforced.

    The schema may be a reference to one of its definitions, because pydantic writes recursive models in this way.
    """
    json_text(schema, limits.MAX_JSON_CHARS)
    shape = schema if "type" in schema else _definition(schema) or schema
    if shape and shape.get("type") != "object":
        raise ValueError(f'the schema has type {shape.get("type")!r}; use a JSON Schema of type "object"')
    properties = shape.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(p, dict | bool) for p in properties.values()):
        raise ValueError("the schema's properties are not valid; map property names to schemas")
    required = shape.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise ValueError("the schema's `required` is not valid; list property names")
    return schema


def _definition(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the definition that the whole schema refers to, or None if the schema is not a reference."""
    path, _, name = str(schema.get("$ref")).rpartition("/")
    definitions = schema.get(path.removeprefix("#/"))
    definition = definitions.get(name) if isinstance(definitions, dict) else None
    return definition if isinstance(definition, dict) else None


def _to_pairs(value: Any) -> Any:
    """Return pairs of a token id and a bias. Accepts {"17": -1.5} (the OpenAI format), ["17=-1.5"] and pairs."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple):
        raise ValueError('the value must map token ids to biases, for example {"17": -1.5}')
    if len(value) > limits.MAX_BIASES:
        raise ValueError(f"there are {len(value)} tokens, and the limit is {limits.MAX_BIASES}; remove some")
    return tuple(_to_pair(entry) for entry in value)


def _to_pair(entry: Any) -> tuple[int, float]:
    try:
        given, added = entry.split("=") if isinstance(entry, str) else entry
        token, bias = int(given), float(added)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f'{shorten(entry)} is not a token id with a bias; write {{"17": -1.5}} or 17=-1.5') from None
    if isinstance(given, float) or not 0 <= token <= limits.MAX_COUNT:
        raise ValueError(f"{shorten(given)} is not a token id; use a whole number, 0 or more")
    if not (abs(bias) <= limits.MAX_BIAS or bias == -math.inf):
        raise ValueError(
            f"{shorten(added)} is not a valid bias; use a number from -{limits.MAX_BIAS:g} to {limits.MAX_BIAS:g}, "
            "or -inf"
        )
    return token, bias


def _to_adapters(value: Any) -> Any:
    """Return pairs of a name and a scale. Accepts {"pirate": 0.5}, ["pirate=0.5"], ["pirate"] (scale 1) and pairs."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, dict | list | tuple):
        raise ValueError('the value must map adapter names to scales, for example {"pirate": 0.5}')
    if len(value) > limits.MAX_ADAPTERS:
        raise ValueError(f"there are {len(value)} adapters, and the limit is {limits.MAX_ADAPTERS}; remove some")
    entries = list(value.items()) if isinstance(value, dict) else [_to_adapter(entry) for entry in value]
    names = [entry[0] for entry in entries if isinstance(entry, list | tuple) and entry]
    if len({name for name in names if isinstance(name, str)}) < sum(isinstance(name, str) for name in names):
        raise ValueError("an adapter is listed twice; set one scale for each adapter")
    return tuple(entries)


def _to_adapter(entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    name, equals, scale = entry.rpartition("=")
    try:
        return (name, float(scale)) if equals else (entry, 1.0)
    except ValueError:
        raise ValueError(f"the scale of {shorten(entry)} is not a number; write NAME, or NAME=0.5") from None


def _check_breaker(text: str) -> str:
    size, limit = len(text.encode()), limits.MAX_DRY_BREAKER_BYTES
    if size > limit:
        raise ValueError(f"the text has {size} bytes in UTF-8, and the limit is {limit}; shorten it")
    return text


Text = Annotated[StrictStr, AfterValidator(_check_text)]
FilledText = Annotated[Text, AfterValidator(_check_filled)]
Name = Annotated[FilledText, at_most(limits.MAX_NAME_CHARS)]
ContextKey = Annotated[StrictStr, AfterValidator(_check_key), BeforeValidator(_key_of_result)]
Finite = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # also accepts whole numbers
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_to_pairs),
    TypedAs("Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]"),
]
Scale = Annotated[Finite, Field(ge=-limits.MAX_ADAPTER_SCALE, le=limits.MAX_ADAPTER_SCALE)]
Adapters = Annotated[
    tuple[tuple[Name, Scale], ...] | None,
    BeforeValidator(_to_adapters),
    TypedAs("str | Mapping[str, float] | Sequence[str] | Sequence[tuple[str, float]] | None"),
]
Texts = Annotated[tuple[FilledText, ...], Field(fail_fast=True), BeforeValidator(_to_texts), TypedAs("Texts")]

Stops = Annotated[
    tuple[Annotated[FilledText, at_most(limits.MAX_STOP_CHARS)], ...],
    no_more_than(limits.MAX_STOPS, "texts"),
    BeforeValidator(_to_tuple),
    TypedAs("Texts"),
]

Breakers = Annotated[
    tuple[Annotated[FilledText, AfterValidator(_check_breaker)], ...],
    no_more_than(limits.MAX_DRY_BREAKERS, "texts"),
    BeforeValidator(_to_tuple),
    TypedAs("Texts"),
]

Penalty = Annotated[Finite, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Count = Annotated[StrictInt, Field(le=limits.MAX_COUNT)]


TAGS = _TEXT, _TOKENS = "<text>", "<tokens>"  # pydantic adds these to the location of an error; they are not shown


def _prompt_kind(value: Any) -> str:
    return _TOKENS if isinstance(value, list | tuple) else _TEXT


TokenId = Annotated[StrictInt, Field(ge=0, le=limits.MAX_COUNT)]
TokenList = Annotated[list[TokenId], Field(fail_fast=True), no_more_than(limits.MAX_PROMPT_TOKENS, "tokens")]
StopTokens = Annotated[tuple[TokenId, ...], no_more_than(limits.MAX_STOP_TOKENS, "tokens")]
TokenIds = Annotated[TokenList, Field(min_length=1)]
TextOrTokens = Annotated[
    Annotated[FilledText, Tag(_TEXT)] | Annotated[TokenIds, Tag(_TOKENS)], Discriminator(_prompt_kind)
]


TextToComplete = Annotated[Annotated[Text, Tag(_TEXT)] | Annotated[TokenIds, Tag(_TOKENS)], Discriminator(_prompt_kind)]


class Payload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolCallFunctionPayload(Payload):
    """The function to call. `arguments` is a JSON object, encoded as a string."""

    name: Name
    arguments: Annotated[Text, AfterValidator(check_escapes), BeforeValidator(to_json)] = "{}"


class ToolCallPayload(Payload):
    """A tool call in an assistant's message, in the format of results."""

    id: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunctionPayload
    partial: StrictBool | None = None


class MessagePayload(Payload):
    """One turn of a conversation. A result's `message` is a valid assistant turn."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Author of the message.")
    content: Annotated[Text | None, BeforeValidator(join_parts)] = Field(
        default=None,
        description="Text of the message. Only assistant messages with `tool_calls` can omit it.",
    )
    reasoning: Text | None = Field(
        default=None, description="Reasoning that precedes the text. Only assistant messages can have it."
    )
    signature: Text | None = Field(
        default=None, description="Signature of the reasoning, as returned in the result's message."
    )
    tool_calls: (
        Annotated[tuple[ToolCallPayload, ...], Field(min_length=1), no_more_than(limits.MAX_TOOL_CALLS, "tool calls")]
        | None
    ) = Field(default=None, description="Tool calls of an assistant message, in the OpenAI format.")
    tool_call_id: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = Field(
        default=None, description="Id of the tool call that a tool message answers."
    )
    name: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] | None = Field(
        default=None, description="Name of the author or tool, for chat templates that use it."
    )

    @model_validator(mode="after")
    def _check_content(self) -> MessagePayload:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant message with tool_calls can omit it")
        if self.role != "assistant" and (self.tool_calls or self.reasoning or self.signature):
            raise ValueError(f"role {self.role!r} does not allow tool_calls, reasoning or signature; remove them")
        return self


class ToolFunctionPayload(Payload):
    """A function that the model may call. `parameters` is a JSON Schema of type object."""

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = None
    strict: StrictBool | None = None


class ToolPayload(Payload):
    """A tool in the OpenAI format."""

    type: Literal["function"]
    function: ToolFunctionPayload


def check_args(value: Any) -> Any:
    if isinstance(value, dict):
        json_text(value, limits.MAX_JSON_CHARS)
    return value


def check_names(tools: tuple[ToolPayload, ...]) -> tuple[ToolPayload, ...]:
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)}: this name is used twice; give each tool a unique name")
    return tools


MAX_PROBLEMS = 8  # maximum number of problems in an error message
CONSTRAINTS = ("json_schema", "regex", "lark", "grammar")  # a job can have at most one of these


class BaseJob(Payload):
    """The parameters that all kinds of jobs have."""

    model: Annotated[Name, AfterValidator(check_model_id), Field(description="Id of the model, or :default.")]
    priority: StrictInt = Field(
        default=PRIORITY_INTERACTIVE, ge=0, le=9, description="Priority, from 0 (most urgent) to 9 (least urgent)."
    )
    timeout: Finite | None = Field(
        default=None, gt=0, le=limits.MAX_TIMEOUT_S, description="Timeout in seconds, counted from submission."
    )
    keep_alive_s: Finite | None = Field(
        default=None,
        ge=-1,
        description="Time in seconds after which the on-demand model is unloaded if it stays idle (default: the "
        "model's `keep_alive_s`). -1 keeps it loaded until another model needs the memory.",
    )


class ReadingJob(BaseJob):
    """The parameters of jobs that prefill a prompt."""

    parent_key: ContextKey | None = Field(
        default=None,
        description="Key of the context to continue, which is the `finish_key` of an earlier result. The prompt or "
        "the messages are appended to the context.",
    )
    cache_scope: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] = Field(
        default="", description="Scope within which jobs share cached prefixes and context keys."
    )
    adapters: Adapters = Field(
        default=None,
        description="LoRA adapters to use instead of the model's defaults, as NAME or NAME=SCALE. NAME=0 disables "
        "an adapter.",
    )


class GenerationJob(ReadingJob):
    """The parameters of jobs that generate text."""

    max_tokens: Count = Field(default=256, ge=1, description="Maximum number of tokens to generate.")
    temperature: Finite = Field(
        default=0.8, ge=0, le=limits.MAX_TEMPERATURE, description="Sampling temperature. 0 selects greedy decoding."
    )
    top_k: Count = Field(default=40, ge=0, description="Number of candidate tokens to keep. 0 keeps all tokens.")
    top_p: Finite = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Total probability of the candidate tokens to keep. 0 keeps only the most likely token.",
    )
    min_p: Finite = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Minimum probability of a candidate token, relative to the most likely token.",
    )
    top_n_sigma: Finite = Field(
        default=0.0,
        ge=-1,
        le=limits.MAX_SIGMA,
        description="Keep only tokens whose logit is within this many standard deviations of the highest logit. 0 or "
        "-1 disables the filter.",
    )
    typical_p: Finite = Field(
        default=1.0, gt=0, le=1, description="Total probability of the typical tokens to keep. 1 disables the filter."
    )
    dynatemp_range: Finite = Field(
        default=0.0,
        ge=0,
        le=limits.MAX_TEMPERATURE,
        description="Maximum deviation of the dynamic temperature from `temperature`. The deviation depends on the "
        "entropy of the candidates. 0 disables dynamic temperature.",
    )
    dynatemp_exponent: Finite = Field(
        default=1.0,
        ge=0,
        le=limits.MAX_DYNATEMP_EXPONENT,
        description="Exponent of the entropy for dynamic temperature.",
    )
    seed: StrictInt | None = Field(
        default=None,
        ge=0,
        le=limits.MAX_SEED,
        description="Seed for the sampler. The same seed produces the same text.",
    )
    repeat_penalty: Finite = Field(
        default=1.0,
        ge=limits.MIN_REPEAT_PENALTY,
        le=limits.MAX_REPEAT_PENALTY,
        description="Penalty factor for repeated tokens. 1 disables the penalty.",
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="Amount subtracted from a token's logit for each occurrence. 0 disables the penalty."
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="Amount subtracted from a token's logit if it has occurred. 0 disables the penalty."
    )
    repeat_last_n: StrictInt = Field(
        default=64,
        ge=0,
        le=limits.MAX_LOOK_BACK,
        description="Number of recent tokens that the penalties consider.",
    )
    logit_bias: LogitBias = Field(
        default=(), description="Bias that is added to a token's logit, as TOKEN=BIAS. Can be repeated."
    )
    dry_multiplier: Finite = Field(
        default=0.0,
        ge=0,
        le=limits.MAX_PENALTY,
        description="Multiplier of the DRY penalty for repeated sequences. 0 disables DRY.",
    )
    dry_base: Finite = Field(
        default=1.75,
        gt=0,
        le=limits.MAX_DRY_BASE,
        description="Factor by which the DRY penalty grows with each repeated token. Values below 1 disable DRY.",
    )
    dry_allowed_length: Count = Field(
        default=2, ge=0, description="Maximum length in tokens of a repetition that DRY does not penalize."
    )
    dry_penalty_last_n: StrictInt = Field(
        default=-1,
        ge=-1,
        le=limits.MAX_LOOK_BACK,
        description="Number of recent tokens that DRY considers. -1 considers all tokens.",
    )
    dry_sequence_breakers: Breakers = Field(
        default=("\n", ":", '"', "*"), description="String at which DRY stops matching a repetition. Can be repeated."
    )
    xtc_probability: Finite = Field(
        default=0.0, ge=0, le=1, description="Probability that XTC removes the top choices. 0 disables XTC."
    )
    xtc_threshold: Finite = Field(default=0.1, ge=0, le=1, description="Minimum probability of a top choice for XTC.")
    mirostat: StrictInt = Field(
        default=0,
        ge=0,
        le=2,
        description="Mirostat version, 1 or 2. Mirostat keeps the surprise of the text constant. 0 disables Mirostat.",
    )
    mirostat_tau: Finite = Field(
        default=5.0, gt=0, le=limits.MAX_MIROSTAT_TAU, description="Target surprise for Mirostat, in bits."
    )
    mirostat_eta: Finite = Field(
        default=0.1, gt=0, le=limits.MAX_MIROSTAT_ETA, description="Learning rate for Mirostat."
    )
    json_schema: Annotated[
        Annotated[FilledText, at_most(limits.MAX_SCHEMA_CHARS), AfterValidator(check_escapes)] | None,
        BeforeValidator(to_json),
        TypedAs("str | JsonObject | bool | None"),
    ] = Field(default=None, description="JSON Schema that the text must follow, or @FILE.")
    strict_schema: StrictBool = Field(
        default=True,
        description="Reject schema keywords that can't be enforced. If false, ignore such keywords with a warning.",
    )
    regex: Annotated[FilledText, at_most(limits.MAX_REGEX_CHARS)] | None = Field(
        default=None, description="Regular expression that the whole text must match, or @FILE."
    )
    lark: Annotated[FilledText, at_most(limits.MAX_LARK_CHARS)] | None = Field(
        default=None, description="Lark grammar that the text must follow, or @FILE."
    )
    grammar: Annotated[FilledText, at_most(limits.MAX_GRAMMAR_CHARS)] | None = Field(
        default=None, description="GBNF grammar that the text must follow, or @FILE."
    )
    grammar_root: Name = Field(default="root", description="Start rule of the GBNF grammar.")
    logprobs: StrictInt | None = Field(
        default=None,
        ge=0,
        le=limits.MAX_LOGPROBS,
        description="Number of alternative tokens to report for each generated token, with log probabilities.",
    )
    n: StrictInt = Field(
        default=1, ge=1, le=limits.MAX_COMPLETIONS, description="Number of completions to generate for the prompt."
    )
    stop: Stops = Field(default=(), description="String that stops generation. Can be repeated.")
    stop_token_ids: StopTokens = Field(default=(), description="Token id that stops generation. Can be repeated.")
    include_stop_str_in_output: StrictBool = Field(
        default=False, description="Include the matched stop string or stop token at the end of the text."
    )
    min_tokens: Count = Field(
        default=0,
        ge=0,
        description="Minimum number of tokens to generate before the model or a stop string can end the text.",
    )
    cache_prompt: StrictBool = Field(default=True, description="Share prefixes with other requests.")
    return_tokens: StrictBool = Field(
        default=False, description="Add `tokens` (output) and `context_tokens` (prompt and output) to the result."
    )
    ignore_eos: StrictBool = Field(default=False, description="Ignore the model's end tokens and continue generating.")
    stream: StrictBool = Field(default=True, description="Publish the text token by token while it is generated.")
    prediction: Annotated[
        TextOrTokens | None, BeforeValidator(to_prediction), TypedAs("Prompt | Prediction | None")
    ] = Field(
        default=None,
        description="Expected output, or @FILE. Parts that match the expected output are generated faster.",
    )

    @model_validator(mode="after")
    def _check_constraints(self) -> GenerationJob:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} can't be combined; choose one of them")
        return self

    @model_validator(mode="after")
    def _check_length(self) -> GenerationJob:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; lower min_tokens, or raise "
                "max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_reported(self) -> GenerationJob:
        count = 0 if self.logprobs is None else self.n * self.max_tokens * (self.logprobs + 1)
        if count > limits.MAX_REPORTED:
            raise ValueError(
                f"logprobs {self.logprobs} with n {self.n} and max_tokens {self.max_tokens} can result in {count} "
                f"entries, and the limit is {limits.MAX_REPORTED}; lower one of these values"
            )
        return self


Prompt = Annotated[TextOrTokens, BeforeValidator(text_of_result), TypedAs("Prompt")]
Inputs = Annotated[
    tuple[TextOrTokens, ...], Field(fail_fast=True), BeforeValidator(to_inputs), TypedAs("TextsOrTokens")
]


Messages = Annotated[
    tuple[MessagePayload, ...],
    Field(fail_fast=True),
    Field(min_length=1),
    no_more_than(limits.MAX_MESSAGES, "messages"),
    TypedAs("Messages"),
]


class ConversationJob(BaseJob):
    """The parameters of jobs whose prompt consists of chat messages."""

    messages: Messages = Field(description="Messages of the conversation, oldest first.")
    system: Text | None = Field(default=None, description="System message, which precedes all other messages.")
    tools: Annotated[
        tuple[ToolPayload, ...],
        AfterValidator(check_names),
        no_more_than(limits.MAX_TOOLS, "tools"),
        TypedAs("Sequence[Tool]"),
    ] = Field(default=(), description="Tools that the model may call, as a JSON list in the OpenAI format.")
    tool_choice: Annotated[Name, BeforeValidator(to_choice), TypedAs("str | ToolChoice")] = Field(
        default="auto", description="Tool choice: auto, none, required, or the name of a tool that the model must call."
    )
    enable_thinking: StrictBool | None = Field(default=None, description="Let the model reason before it answers.")
    template_args: Annotated[dict[StrictStr, Any], BeforeValidator(check_args), TypedAs("JsonObject")] = Field(
        default_factory=dict, description="Variables for the model's chat template, as JSON."
    )

    chat_template: Annotated[FilledText, at_most(limits.MAX_TEMPLATE_CHARS)] | None = Field(
        default=None,
        description="Jinja template to use instead of the model's own template, or @FILE. The setting "
        "`chat_templates_in_jobs` must allow it.",
    )

    @model_validator(mode="after")
    def _check_template(self) -> ConversationJob:
        if self.chat_template is not None and not get_settings().chat_templates_in_jobs:
            raise ValueError(
                "chat_template: the setting chat_templates_in_jobs does not allow templates in jobs; remove it, or "
                "enable the setting for producers and workers"
            )
        return self

    @model_validator(mode="after")
    def _check_system(self) -> ConversationJob:
        if self.system is not None and self.messages and self.messages[0].role == "system":
            raise ValueError("system: messages already start with a system message; remove one of them")
        if self.system is not None and getattr(self, "parent_key", None) is not None:
            raise ValueError("system: the conversation of parent_key has already started; remove system or parent_key")
        return self


class RepliedJob(ConversationJob):
    """The parameters of jobs whose reply either follows the last message or continues the last message."""

    add_generation_prompt: StrictBool = Field(default=True, description="Start a reply after the last message.")
    continue_final_message: StrictBool | None = Field(
        default=None,
        description="If the last message is from the assistant, continue its text (default) instead of starting a "
        "new reply.",
    )


Job = TypeVar("Job", bound=BaseJob)


def free_of(kind: type[BaseJob], positional: Sequence[str], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that a call's positional arguments set, in order.

    In `chain(load.s(), generate.s(model="tiny"))`, the result of `load` is the prompt. If the prompt is given by name,
    as in `chain(generate.s("tiny", "Hi"), generate.s(model="tiny", prompt=" and"))`, the result is the `parent_key`.
    """
    free = [name for name in positional if name not in kwargs]
    return free or [name for name in ("parent_key",) if name in kind.model_fields and name not in kwargs]


def parse_job(kind: type[Job], positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Job:
    """Return the payload of a Celery call, whose `positional` parameters can be passed by position.

    Raises InvalidJob, which lists each problem with its parameter, value and remedy.
    """
    free = free_of(kind, positional, kwargs)
    names = free if len(args) <= len(free) else positional
    if len(args) > len(names):
        raise InvalidJob(
            f"got {len(args)} positional arguments, but at most {len(names)} are allowed: {', '.join(names)}"
        )
    values = dict(zip(names, args, strict=False))
    twice = values.keys() & kwargs.keys()
    if twice:
        raise InvalidJob(f"{', '.join(sorted(twice))}: passed both by position and by name; remove one of them")
    try:
        return kind.model_validate({**values, **kwargs})
    except ValidationError as error:
        message = _describe_all(error.errors(include_url=False), kind.model_fields)
    # This is outside of `except`, so that pydantic's error is not the context of InvalidJob. Python's garbage collector
    # can't inspect pydantic's error, so all frames that it references would never be freed, with the payload.
    raise InvalidJob(message)


def _describe_all(problems: Sequence[Any], known: Mapping[str, Any]) -> str:
    # For pydantic, a list with an invalid item is also too short. The problem of the item itself is more precise.
    problems = [each for each in problems if each["type"] != "too_short" or not each["input"]] or problems
    descriptions = dict.fromkeys(_describe(problem, known) for problem in problems[:MAX_PROBLEMS])
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "; ".join([*descriptions, *more])


def _describe(problem: Any, known: Mapping[str, Any]) -> str:
    where = ".".join(_part_of_location(part) for part in problem["loc"] if part not in TAGS)
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return unknown_parameter(str(problem["loc"][0]), known)
    if problem["type"] == "missing":
        return f"{where} is missing"
    is_empty = problem["type"] == "too_short" and not problem["input"]
    message = "the value is empty; provide at least one" if is_empty else problem["msg"].removeprefix("Value error, ")
    return f"{where} is {shorten(problem['input'])}: {message}" if where else message


def unknown_parameter(name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown parameter."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the parameters are: {', '.join(sorted(known))}"
    return f"unknown parameter {shorten(name)}; {hint}"


def _part_of_location(part: int | str) -> str:
    return shorten(part).strip("'") if isinstance(part, str) else str(part)
