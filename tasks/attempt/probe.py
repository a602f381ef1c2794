"""Remote control: how much of a prompt this worker has in its cache. Imported in workers only."""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from cellama.config.limits import MAX_PROBE_CHARS
from cellama.engine import EngineError, ModelManager
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.prefill import PrefillJob
from cellama.tasks.contract.payloads import parse_job

from .engine_request import tokens_to_read


@inspect_command(args=[("job", dict)])  # type: ignore[untyped-decorator]
def cellama_cached_prefix(state: Any, job: dict[str, Any], **_: Any) -> dict[str, Any]:
    """How much of what a `prefill` would read is in the cache, and in which tier."""
    try:
        return {"ok": cached_prefix(state.app.runtime.manager, parse_job(PrefillJob, (), (), job))}
    except (EngineError, InvalidJob) as error:
        return {"error": str(error), "code": error.code}


def cached_prefix(manager: ModelManager, job: PrefillJob) -> dict[str, Any]:
    """As `CachedPrefix` has it, but for the worker. On its main thread, which must go on soon: long texts are refused.

    Raises InvalidJob, EngineError.
    """
    texts = [job.prompt] if isinstance(job.prompt, str) else [message.content or "" for message in job.messages]
    num_chars = sum(map(len, texts)) + len(job.system or "")
    if num_chars > MAX_PROBE_CHARS or job.parent_key is not None:
        raise InvalidJob(
            f"texts of up to {MAX_PROBE_CHARS} characters are looked for (these have {num_chars}), and nothing after a "
            "parent_key; give the token ids of the whole prompt"
        )
    model = manager.get(job.model)
    tokens = tokens_to_read(model, job)
    tiers = model.cached_prefix(tokens, job.cache_scope, job.adapters)
    tier = max(tiers, key=lambda name: tiers[name])  # the fastest of those that have as much
    return {
        "prompt_tokens": len(tokens),
        "cached_tokens": tiers[tier],
        "tier": tier if tiers[tier] else None,
        "tiers": dict(tiers),
    }
