"""The payloads of jobs: validated where they are made, and again where they are run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from cellama.config import limits

from .errors import InvalidJob
from .fields import (
    TAGS,
    Adapters,
    Breakers,
    ContextKey,
    Count,
    FilledText,
    Finite,
    LogitBias,
    Name,
    Penalty,
    Stops,
    Text,
    TextOrTokens,
    TypedAs,
    at_most,
    check_model_id,
    no_more_than,
    text_of_result,
    to_choice,
    to_inputs,
    to_json,
    to_prediction,
)
from .json_values import check_escapes, shorten
from .messages import MessagePayload, Payload, ToolPayload, check_args, check_names
from .names import PRIORITY_INTERACTIVE

MAX_PROBLEMS = 8  # that an error tells of
CONSTRAINTS = ("json_schema", "regex", "lark", "grammar")  # a job has at most one of them


class BaseJob(Payload):
    """Every job."""

    model: Annotated[Name, AfterValidator(check_model_id), Field(description="Id of the model, or :default.")]
    priority: StrictInt = Field(
        default=PRIORITY_INTERACTIVE, ge=0, le=9, description="Priority: 0 is the most urgent, 9 the least."
    )
    timeout: Finite | None = Field(default=None, gt=0, le=limits.MAX_TIMEOUT_S, description="Seconds from submission.")


class ReadingJob(BaseJob):
    """A job that prefills a prompt."""

    parent_key: ContextKey | None = Field(
        default=None,
        description="Continue the context with this key, which is the `finish_key` of a result. The prompt or the "
        "messages follow it.",
    )
    cache_scope: Annotated[Text, at_most(limits.MAX_NAME_CHARS)] = Field(
        default="", description="Share prefixes and keys only within this scope."
    )
    adapters: Adapters = Field(
        default=None, description="LoRA adapters, NAME or NAME=SCALE, instead of those of the model. NAME=0 uses none."
    )


class GenerationJob(ReadingJob):
    """A job that generates text."""

    max_tokens: Count = Field(default=256, ge=1, description="Maximum number of tokens to generate.")
    temperature: Finite = Field(default=0.8, ge=0, le=limits.MAX_TEMPERATURE, description="Temperature. 0 is greedy.")
    top_k: Count = Field(default=40, ge=0, description="Number of candidates kept. 0 keeps all.")
    top_p: Finite = Field(default=0.95, gt=0, le=1, description="Probability mass of the candidates kept.")
    min_p: Finite = Field(default=0.05, ge=0, le=1, description="Minimum probability, relative to the best candidate.")
    typical_p: Finite = Field(default=1.0, gt=0, le=1, description="Mass of the typical tokens kept. 1 disables it.")
    seed: StrictInt | None = Field(
        default=None, ge=0, le=limits.MAX_SEED, description="Seed. The same seed gives the same text."
    )
    repeat_penalty: Finite = Field(
        default=1.0,
        ge=limits.MIN_REPEAT_PENALTY,
        le=limits.MAX_REPEAT_PENALTY,
        description="Factor that makes repeated tokens less likely. 1 disables it.",
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="Subtracted from the logit of a token per occurrence. 0 disables it."
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="Subtracted from the logit of a token that occurred. 0 disables it."
    )
    repeat_last_n: StrictInt = Field(
        default=64, ge=0, le=limits.MAX_LOOK_BACK, description="Number of last tokens that the penalties consider."
    )
    logit_bias: LogitBias = Field(default=(), description="TOKEN=BIAS, added to the token's logit. Can be repeated.")
    dry_multiplier: Finite = Field(
        default=0.0, ge=0, le=limits.MAX_PENALTY, description="DRY penalty against repeated sequences. 0 disables it."
    )
    dry_base: Finite = Field(
        default=1.75,
        gt=0,
        le=limits.MAX_DRY_BASE,
        description="DRY: growth of the penalty per token. Below 1 disables it.",
    )
    dry_allowed_length: Count = Field(default=2, ge=0, description="DRY: tokens of a repetition without penalty.")
    dry_penalty_last_n: StrictInt = Field(
        default=-1, ge=-1, le=limits.MAX_LOOK_BACK, description="DRY: last tokens considered. -1 considers all."
    )
    dry_sequence_breakers: Breakers = Field(
        default=("\n", ":", '"', "*"), description="DRY: text that a repetition does not cross. Can be repeated."
    )
    xtc_probability: Finite = Field(
        default=0.0, ge=0, le=1, description="XTC: probability of removing the top choices. 0 disables it."
    )
    xtc_threshold: Finite = Field(default=0.1, ge=0, le=1, description="XTC: minimum probability of a top choice.")
    mirostat: StrictInt = Field(
        default=0, ge=0, le=2, description="Mirostat version 1 or 2, which keeps the surprise steady. 0 disables it."
    )
    mirostat_tau: Finite = Field(
        default=5.0, gt=0, le=limits.MAX_MIROSTAT_TAU, description="Mirostat: target surprise (bits)."
    )
    mirostat_eta: Finite = Field(default=0.1, gt=0, le=limits.MAX_MIROSTAT_ETA, description="Mirostat: learning rate.")
    json_schema: Annotated[
        Annotated[FilledText, at_most(limits.MAX_SCHEMA_CHARS), AfterValidator(check_escapes)] | None,
        BeforeValidator(to_json),
        TypedAs("str | JsonObject | bool | None"),
    ] = Field(default=None, description="JSON Schema that the text must follow, or @FILE.")
    strict_schema: StrictBool = Field(
        default=True,
        description="Refuse keywords of the schema that can't be enforced. If false, ignore them with a warning.",
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
        default=None, ge=0, le=limits.MAX_LOGPROBS, description="Number of alternatives to report per token."
    )
    n: StrictInt = Field(default=1, ge=1, le=limits.MAX_COMPLETIONS, description="Number of completions of the prompt.")
    stop: Stops = Field(default=(), description="Text that ends the generation. Can be repeated.")
    cache_prompt: StrictBool = Field(default=True, description="Share prefixes with other requests.")
    return_tokens: StrictBool = Field(
        default=False, description="Add `tokens` to the result, and `context_tokens`: those of prompt and output."
    )
    ignore_eos: StrictBool = Field(default=False, description="Continue where the model would end.")
    stream: StrictBool = Field(default=True, description="Publish the text token by token.")
    prediction: Annotated[
        TextOrTokens | None, BeforeValidator(to_prediction), TypedAs("Prompt | Prediction | None")
    ] = Field(default=None, description="Expected output, or @FILE. Correct parts of it are generated faster.")

    @model_validator(mode="after")
    def _check_forms(self) -> GenerationJob:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given together; choose one")
        return self

    @model_validator(mode="after")
    def _check_reported(self) -> GenerationJob:
        count = 0 if self.logprobs is None else self.n * self.max_tokens * (self.logprobs + 1)
        if count > limits.MAX_REPORTED:
            raise ValueError(
                f"logprobs {self.logprobs} for n {self.n} and max_tokens {self.max_tokens} make up to {count} entries, "
                f"and the limit is {limits.MAX_REPORTED}; lower one of them"
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
    """A job with the messages of a chat."""

    messages: Messages
    system: Text | None = Field(default=None, description="System message before all others.")
    tools: Annotated[
        tuple[ToolPayload, ...],
        AfterValidator(check_names),
        no_more_than(limits.MAX_TOOLS, "tools"),
        TypedAs("Sequence[Tool]"),
    ] = Field(default=(), description="Tools that the model may call: a JSON list in the OpenAI format.")
    tool_choice: Annotated[Name, BeforeValidator(to_choice), TypedAs("str | ToolChoice")] = Field(
        default="auto", description="auto, none, required, or the name of a tool that must be called."
    )
    enable_thinking: StrictBool | None = Field(default=None, description="Let the model think before it answers.")
    template_args: Annotated[dict[StrictStr, Any], BeforeValidator(check_args), TypedAs("JsonObject")] = Field(
        default_factory=dict, description="Variables of the model's chat template, as JSON."
    )

    @model_validator(mode="after")
    def _check_system(self) -> ConversationJob:
        if self.system is not None and self.messages and self.messages[0].role == "system":
            raise ValueError("system is given, and messages begin with a system's message, too; leave one out")
        if self.system is not None and getattr(self, "parent_key", None) is not None:
            raise ValueError("system is given, and the conversation of parent_key has begun already; leave one out")
        return self


Job = TypeVar("Job", bound=BaseJob)


def free_of(kind: type[BaseJob], positional: Sequence[str], kwargs: Mapping[str, Any]) -> list[str]:
    """What positional arguments stand for: a parent's result in `chain(load.s(), generate.s(model="tiny"))` is the
    prompt; in `chain(generate.s("tiny", "Hi"), generate.s(model="tiny", prompt=" and"))` it is what to go on after."""
    free = [name for name in positional if name not in kwargs]
    return free or [name for name in ("parent_key",) if name in kind.model_fields and name not in kwargs]


def parse_job(kind: type[Job], positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Job:
    """The job of a Celery call whose `positional` parameters may be given by position. Raises InvalidJob that lists
    every problem: parameter, value, remedy."""
    free = free_of(kind, positional, kwargs)
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
    # A list with a bad item counts as too short for pydantic; the item's own problem says what is wrong.
    problems = [each for each in problems if each["type"] != "too_short" or not each["input"]] or problems
    told = dict.fromkeys(_explain(problem, known) for problem in problems[:MAX_PROBLEMS])
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "; ".join([*told, *more])


def _explain(problem: Any, known: Mapping[str, Any]) -> str:
    where = ".".join(_of_place(part) for part in problem["loc"] if part not in TAGS)
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        name = str(problem["loc"][0])
        close = difflib.get_close_matches(name, list(known), n=1)
        return f"unknown parameter {shorten(name)}; " + (
            f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
        )
    if problem["type"] == "missing":
        return f"{where} is missing"
    is_empty = problem["type"] == "too_short" and not problem["input"]
    message = "it is empty; give at least one" if is_empty else problem["msg"].removeprefix("Value error, ")
    return f"{where} is {shorten(problem['input'])}: {message}" if where else message


def _of_place(part: int | str) -> str:
    return shorten(part).strip("'") if isinstance(part, str) else str(part)
