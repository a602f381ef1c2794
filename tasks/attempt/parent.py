"""The context that a job continues: the tokens behind its `parent_key` (docs/adr/014-kept-states.md).

A key is only ever looked up. What is found counts if its tokens have this key for the scope and the adapters of the job
that asks; else nothing was found, and no answer tells a key of others from one that there is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellama.engine import Context, Model, UnknownKey
from cellama.tasks.state.contexts import KeptContext, keep_context, read_context

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

Choice = tuple[tuple[str, float], ...]  # adapters by name, and their scales


def parent_tokens(runtime: Runtime, model: Model, key: str, scope: str, adapters: Choice) -> tuple[int, ...]:
    """The tokens of a context: of one that ended in this worker, or lies in its folder of states, or in Redis.

    It is in Redis then for as long as the job's journal is, so that a later attempt goes on after the same. Raises
    UnknownKey, UnknownAdapter, RedisError.
    """
    redis, settings = runtime.redis, runtime.settings
    ttl_s = max(settings.result_ttl_s, settings.journal_ttl_s)
    fingerprint = model.info.fingerprint
    try:
        tokens = model.engine.context_of(key, scope, adapters)
    except UnknownKey as unknown:
        found = read_context(redis, key, fingerprint, ttl_s)
        if found is None or not _is_of(found, model, key, scope, adapters):
            raise unknown from None
        if found.model != fingerprint:
            raise UnknownKey(
                f"parent_key {key!r} is of a context of another model than {model.id!r} is now, which reads other "
                "tokens: send the whole prompt without parent_key"
            ) from None
        return tuple(found.tokens)
    keep_context(redis, key, KeptContext(fingerprint, model.engine.identity, tokens), ttl_s)
    return tokens


def _is_of(found: KeptContext, model: Model, key: str, scope: str, adapters: Choice) -> bool:
    """Whether the tokens have this key for whoever asks. Where the model is set up in another way than where they were
    computed their identity differs, and they are read again."""
    fingerprints = {info.name: info.fingerprint for info in model.adapters()}
    pairs = tuple((fingerprints.get(name, ""), scale) for name, scale in adapters)
    return Context(found.identity, pairs, scope, tuple(found.tokens)).key == key
