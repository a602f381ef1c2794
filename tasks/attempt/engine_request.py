"""Convert a job into a request to an engine, including the context that it continues (docs/adr/014-kept-states.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cellama.config import get_settings
from cellama.engine import (
    ChatOptions,
    ChatPrompt,
    Context,
    Message,
    Model,
    ReplyFormat,
    Request,
    Resumed,
    SamplingParams,
    Share,
    UnknownKey,
    sampling_of,
    wanted_text,
)
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.payloads import CONSTRAINTS
from cellama.tasks.contract.shapes.results import Mode
from cellama.tasks.state.contexts import KeptContext, keep_context, read_context
from cellama.tasks.state.history import Choice
from cellama.tasks.state.ledger import Attempt
from cellama.tasks.worker.signing import Signer, conversation_of

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

SAMPLING = tuple(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """The fields of an engine request that don't come from the job's parameters."""

    id: str
    submitted_at: float  # monotonic time in seconds
    priority: int
    adapters: Choice  # adapters of the model, or those that the job chooses
    sampling: Mapping[str, object]  # defaults of the model when the job started
    mode: Mode
    share: Share
    seed: int | None = None  # replaces the job's seed unless it is None
    resume: tuple[Resumed, ...] = ()  # tokens of earlier attempts
    parent: tuple[int, ...] = ()  # tokens of a context that the prompt follows: of `parent_key`, or of a reply
    num_replayed: int = 0  # first messages of a chat that `parent` contains


def share_of(attempt: Attempt) -> Share:
    """Return the fairness key and weights that determine which share of the slots an attempt's requests get."""
    return Share(attempt.fairness_key, attempt.fairness_weights, get_settings().prefill_cost)


def prefill_of(model: Model, job: PrefillJob, extras: RequestExtras) -> Request:
    """Return the request that prefills a prompt without sampling. Raises EngineError or InvalidJob."""
    return Request(
        id=extras.id,
        prompt=(*extras.parent, *prefill_tokens(model, job)),
        max_tokens=0,
        adapters=extras.adapters,
        cache_scope=job.cache_scope,
        timeout_s=job.timeout,
        priority=extras.priority,
        share=extras.share,
        submitted_at=extras.submitted_at,
        mode=extras.mode,
    )


def prefill_tokens(model: Model, job: PrefillJob) -> Sequence[int]:
    """Return the tokens to prefill.

    The tokens of a conversation end before the reply, so all replies share these tokens.
    """
    if job.prompt is not None:
        model.require("generate")
        return _tokens_of(model, job.prompt, job.parent_key)
    model.require("chat")
    messages, options = conversation_of(job)
    if job.parent_key is not None:
        return model.prepare_chat(messages, options, follows_reply=True).tokens
    return model.tokenize_prefix(messages, options)


def _tokens_of(model: Model, prompt: str | list[int], parent_key: str | None) -> list[int]:
    """Return the tokens of a prompt. A prompt that follows a parent's context has no special tokens at its start."""
    return model.tokenize(prompt, add_special=parent_key is None) if isinstance(prompt, str) else prompt


def _expected_tokens(model: Model, prediction: str | list[int] | None) -> tuple[int, ...]:
    """Return a prediction's tokens, without special tokens at the start, because the prediction follows a prompt."""
    if isinstance(prediction, str):
        prediction = model.tokenize(prediction, add_special=False)
    return tuple(prediction or ())


def request_of(model: Model, job: GenerateJob | ChatJob, extras: RequestExtras, signer: Signer) -> Request:
    """Return the request for a generation or a chat. Raises EngineError or InvalidJob."""
    sampling = {name: getattr(job, name) for name in SAMPLING if name in job.model_fields_set}
    prompt = _prompt_of(model, job, extras, signer, sampling)
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
        include_stop_str_in_output=job.include_stop_str_in_output,
        ignore_eos=job.ignore_eos,
        return_tokens=job.return_tokens,
        timeout_s=job.timeout,
        priority=extras.priority,
        share=extras.share,
        submitted_at=extras.submitted_at,
        mode=extras.mode,
        reply=prompt.reply,
        warnings=prompt.warnings,
        prediction=_expected_tokens(model, job.prediction),
        resume=extras.resume,
    )


def is_constrained(params: Mapping[str, object], defaults: Mapping[str, object]) -> bool:
    """Return whether a schema, a regular expression, a grammar or the tool call format constrains the text.

    `params` are the parameters of a generation or chat, and `defaults` are the model's sampling defaults.
    """
    if params.get("tools") and params.get("tool_choice") != "none":
        return True
    return any(params.get(name, defaults.get(name)) is not None for name in CONSTRAINTS)


def has_seed(job: GenerateJob | ChatJob, defaults: Mapping[str, object]) -> bool:
    """Return whether the job or the model's sampling defaults set a seed."""
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
    extras: RequestExtras,
    signer: Signer,
    sampling: Mapping[str, object],
) -> _Prompt | ChatPrompt:
    if isinstance(job, GenerateJob):
        model.require("generate")
        if job.suffix is not None:
            files = [(file.filename, file.text) for file in job.input_extra]
            return _Prompt(model.fill_in_the_middle(job.prompt, job.suffix, files))
        return _Prompt(_tokens_of(model, job.prompt, job.parent_key))
    model.require("chat")
    messages, options = conversation_of(job)
    _check_signatures(messages, options, signer, job.parent_key)
    wanted = wanted_text(sampling, extras.sampling, options)
    if num := extras.num_replayed:
        last = messages[num - 1]
        return model.prepare_chat(messages[num:], options, follows_reply=True, last_reply=last, wanted=wanted)
    return model.prepare_chat(messages, options, follows_reply=job.parent_key is not None, wanted=wanted)


def _check_signatures(
    messages: Sequence[Message], options: ChatOptions, signer: Signer, parent_key: str | None
) -> None:
    """Raise InvalidJob if the reasoning in a message does not match its signature."""
    conversation = options.all_of(messages)
    if (wrong := signer.first_wrong(conversation, parent_key)) is not None:
        index = wrong - len(conversation) + len(messages)
        raise InvalidJob(
            f"messages.{index}: the signature does not match the reasoning, the messages before it and the parent_key; "
            "send them unchanged, or omit the signature"
        )


def parent_tokens(runtime: Runtime, model: Model, key: str, scope: str, adapters: Choice) -> tuple[int, ...]:
    """Return a context's tokens, read from this worker's memory, its KV state directory, or Redis.

    A context is used only if its tokens have the given key for the job's scope and adapters. Otherwise, the key is
    treated as unknown, so that no error reveals whether the key exists in another scope. The context is stored in Redis
    for as long as the job's journal, so that later attempts continue the same tokens. Raises UnknownKey, UnknownAdapter
    or RedisError.
    """
    redis, settings = runtime.redis, runtime.settings
    ttl_s = max(settings.result_ttl_s, settings.journal_ttl_s)
    fingerprint = model.info.fingerprint
    try:
        tokens = model.engine.context_of(key, scope, adapters)
    except UnknownKey as unknown:
        context = read_context(redis, key, fingerprint, ttl_s)
        if context is None or not _has_key(context, model, key, scope, adapters):
            raise unknown from None
        if context.model != fingerprint:
            raise UnknownKey(
                f"parent_key: {key!r} belongs to an earlier model {model.id!r} with different tokens; send the whole "
                "prompt without parent_key"
            ) from None
        return tuple(context.tokens)
    keep_context(redis, key, KeptContext(fingerprint, model.engine.identity, tokens), ttl_s)
    return tokens


def _has_key(context: KeptContext, model: Model, key: str, scope: str, adapters: Choice) -> bool:
    """Return whether a context has this key for a job with this scope and these adapters.

    The key contains the identity of the engine that computed the context. This engine's identity may be different, for
    example because its KV cache has a different data type. In this case, the tokens are prefilled again.
    """
    fingerprints = {info.name: info.fingerprint for info in model.adapters()}
    pairs = tuple((fingerprints.get(name, ""), scale) for name, scale in adapters)
    return Context(context.identity, pairs, scope, tuple(context.tokens)).key == key
