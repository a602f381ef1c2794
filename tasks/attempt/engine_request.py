"""The request to an engine that a job becomes: its prompt, and what it resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cellama.engine import (
    ChatOptions,
    ChatPrompt,
    Message,
    Model,
    ReplyFormat,
    Request,
    Resumed,
    SamplingParams,
    sampling_of,
    wanted_text,
)
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.payloads import CONSTRAINTS
from cellama.tasks.contract.shapes.results import Mode
from cellama.tasks.publishing.signing import Signer
from cellama.tasks.worker.conversation import conversation_of

SAMPLING = tuple(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """What a request has in addition to the job's own parameters. `submitted_at` is `time.monotonic()`."""

    id: str
    submitted_at: float
    priority: int
    adapters: tuple[tuple[str, float], ...]  # of the model, or those that the job chose
    sampling: Mapping[str, object]  # the model's defaults, as the job began with them
    mode: Mode
    seed: int | None = None  # instead of the job's own, None leaves that
    resume: tuple[Resumed, ...] = ()
    parent: tuple[int, ...] = ()  # the context of `parent_key`; the prompt follows


def prefill_of(model: Model, job: PrefillJob, extras: RequestExtras) -> Request:
    """Return the request that prefills a prompt and samples nothing. Raises EngineError, InvalidJob."""
    return Request(
        id=extras.id,
        prompt=(*extras.parent, *tokens_to_read(model, job)),
        max_tokens=0,
        adapters=extras.adapters,
        cache_scope=job.cache_scope,
        timeout_s=job.timeout,
        priority=extras.priority,
        submitted_at=extras.submitted_at,
        mode=extras.mode,
    )


def tokens_to_read(model: Model, job: PrefillJob) -> Sequence[int]:
    """Return the tokens to prefill. Those of a conversation end before the reply, so that all continuations share
    them."""
    if job.prompt is not None:
        model.require("generate")
        return _tokens_of(model, job.prompt, job.parent_key)
    model.require("chat")
    messages, options = conversation_of(job)
    if job.parent_key is not None:
        return model.prepare_chat(messages, options, follows_reply=True).tokens
    return model.tokenize_chat(options.all_of(messages), add_generation_prompt=False, **options.variables)


def _tokens_of(model: Model, prompt: str | list[int], parent_key: str | None) -> list[int]:
    """Return the tokens of a prompt. After a parent's context it begins without special tokens."""
    return model.tokenize(prompt, add_special=parent_key is None) if isinstance(prompt, str) else prompt


def _expected_tokens(model: Model, prediction: str | list[int] | None) -> tuple[int, ...]:
    """Return the tokens of a prediction. They follow a prompt, so they begin without special tokens."""
    if isinstance(prediction, str):
        prediction = model.tokenize(prediction, add_special=False)
    return tuple(prediction or ())


def request_of(model: Model, job: GenerateJob | ChatJob, extras: RequestExtras, signer: Signer) -> Request:
    """Return the request of a generation or a chat. Raises EngineError, InvalidJob."""
    sampling = {name: getattr(job, name) for name in SAMPLING if name in job.model_fields_set}
    prompt = _prompt_of(model, job, signer, sampling, extras.sampling)
    sampling |= prompt.sampling
    if extras.seed is not None:
        sampling["seed"] = extras.seed
    return Request(
        id=extras.id,
        prompt=(*extras.parent, *prompt.tokens),
        sampling=sampling_of(sampling, extras.sampling),
        max_tokens=job.max_tokens,
        n=job.n,
        adapters=extras.adapters,
        cache_prompt=job.cache_prompt,
        cache_scope=job.cache_scope,
        stop=job.stop,
        ignore_eos=job.ignore_eos,
        return_tokens=job.return_tokens,
        timeout_s=job.timeout,
        priority=extras.priority,
        submitted_at=extras.submitted_at,
        mode=extras.mode,
        reply=prompt.reply,
        warnings=prompt.warnings,
        prediction=_expected_tokens(model, job.prediction),
        resume=extras.resume,
    )


def is_constrained(params: Mapping[str, object], defaults: Mapping[str, object]) -> bool:
    """Return whether a schema, a regular expression, a grammar or the format of tool calls constrains the text.

    `params` are those that a generation or a chat was given, `defaults` those of the model.
    """
    if params.get("tools") and params.get("tool_choice") != "none":
        return True
    return any(params.get(name, defaults.get(name)) is not None for name in CONSTRAINTS)


def has_seed(job: GenerateJob | ChatJob, defaults: Mapping[str, object]) -> bool:
    """Return whether the job has a seed, its own or that of the model's defaults."""
    seed = job.seed if "seed" in job.model_fields_set else defaults.get("seed")
    return seed is not None


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: list[int]
    reply: ReplyFormat | None = None
    sampling: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def _prompt_of(
    model: Model,
    job: GenerateJob | ChatJob,
    signer: Signer,
    sampling: Mapping[str, object],
    defaults: Mapping[str, object],
) -> _Prompt | ChatPrompt:
    if isinstance(job, GenerateJob):
        model.require("generate")
        return _Prompt(_tokens_of(model, job.prompt, job.parent_key))
    model.require("chat")
    messages, options = conversation_of(job)
    _check_signatures(messages, options, signer, job.parent_key)
    wanted = wanted_text(sampling, defaults, options)
    return model.prepare_chat(messages, options, follows_reply=job.parent_key is not None, wanted=wanted)


def _check_signatures(
    messages: Sequence[Message], options: ChatOptions, signer: Signer, parent_key: str | None
) -> None:
    """Raise InvalidJob if reasoning does not match its signature after these messages and this parent."""
    conversation = options.all_of(messages)
    if (wrong := signer.first_wrong(conversation, parent_key)) is not None:
        place = wrong - len(conversation) + len(messages)
        raise InvalidJob(
            f"messages.{place}: the signature is not that of its reasoning after the "
            "messages before it and the parent_key; send all of them as they came, or leave the signature out"
        )
