"""Add a remote control command that reports how much of a prompt is in this worker's cache.

Only workers import this module.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from cellama.config.limits import MAX_PROBE_CHARS
from cellama.engine import EngineError, ModelManager
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.payloads import parse_job

from .engine_request import prefill_tokens


@inspect_command(args=[("job", dict)])  # type: ignore[untyped-decorator]
def cellama_cached_prefix(state: Any, job: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Report how many of the tokens that a prefill would compute are in the cache, and in which tier."""
    try:
        return {"ok": cached_prefix(state.app.runtime.manager, parse_job(PrefillJob, (), (), job))}
    except (EngineError, InvalidJob) as error:
        return {"error": str(error), "code": error.code}


def cached_prefix(manager: ModelManager, job: PrefillJob) -> dict[str, Any]:
    """Return the fields of `CachedPrefix` except `worker`. Raises InvalidJob or EngineError.

    This function runs on the worker's main thread, so it rejects texts that would take too long to tokenize.
    """
    texts = [job.prompt] if isinstance(job.prompt, str) else [message.content or "" for message in job.messages]
    num_chars = sum(map(len, texts)) + len(job.system or "")
    if job.parent_key is not None:
        raise InvalidJob(
            "parent_key: a prompt that follows a parent_key can't be looked up; pass the token ids of the whole prompt"
        )
    if num_chars > MAX_PROBE_CHARS:
        raise InvalidJob(
            f"prompt: the text has {num_chars} characters, and the limit is {MAX_PROBE_CHARS}; pass the token ids of "
            "the prompt"
        )
    model = manager.get(job.model)
    tokens = prefill_tokens(model, job)
    tiers = model.cached_prefix(tokens, job.cache_scope, job.adapters)
    tier = max(tiers, key=lambda name: tiers[name])  # if tiers are equal, the first and fastest one
    return {
        "prompt_tokens": len(tokens),
        "cached_tokens": tiers[tier],
        "tier": tier if tiers[tier] else None,
        "tiers": dict(tiers),
    }
