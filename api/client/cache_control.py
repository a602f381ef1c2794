"""What workers have in their caches: looks that no engine is waited for, and `evict`."""

from __future__ import annotations

from typing import Unpack, cast

from cellama.tasks.contract.errors import UnknownModel
from cellama.tasks.contract.kinds import KINDS
from cellama.tasks.contract.names import DEFAULT_MODEL, TASK_PREFILL, evicting_key
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.contract.shapes.parameters import PrefillParams, Prompt
from cellama.tasks.contract.shapes.workers import CachedPrefix, CacheHit
from cellama.tasks.state.registry import WorkerEntry

from .commands import Whom
from .core import Core

EVICT_TIMEOUT_S = 60.0


class CacheControl:
    """The KV caches of models on running workers."""

    _core: Core

    def cached_prefix(
        self, model: str, prompt: Prompt | None = None, *, worker: str | None = None, **params: Unpack[PrefillParams]
    ) -> list[CachedPrefix]:
        """How much of a prompt, or of the `messages` of a chat, each worker has in its cache, and in which tier; who
        has most comes first. No engine is waited for, and nothing changes.

        `params` as of `prefill`, but for `parent_key`. Texts have up to 100,000 characters here; of longer ones give
        the token ids. Raises InvalidJob, UnknownModel, UnknownWorker, JobFailed.
        """
        parse_job(KINDS[TASK_PREFILL].payload, (), (), {"model": model, "prompt": prompt, **params})
        model_id = None if model == DEFAULT_MODEL else model
        told = self._core.commands.ask(
            "cellama_cached_prefix", {"job": {"model": model, "prompt": prompt, **params}}, Whom(worker), model_id
        )
        found = [cast(CachedPrefix, {"worker": name, **answer["ok"]}) for name, answer in told.items()]
        return sorted(found, key=lambda prefix: (-prefix["cached_tokens"], prefix["worker"]))

    def last_cache_hit(self, model_id: str) -> dict[str, CacheHit | None]:
        """By worker: what the job that got a slot of the model last took over of its prompt; None before the first. As
        the last heartbeats told it. Raises UnknownModel."""
        found = {w.name: m.get("last_cache_hit") for w in self._core.workers() for m in w.models if m["id"] == model_id}
        if not found:
            raise UnknownModel(f"no live worker has a model {model_id!r}; `cellama models list` shows what there is")
        return found

    def evict(
        self, model_id: str, *, worker: str | None = None, pool: str | None = None, timeout: float = EVICT_TIMEOUT_S
    ) -> None:
        """Empties the model's idle slots and its RAM tier; what is worth it is on disk then, if there is a `cache_dir`.
        The model stays, and jobs go on. Raises UnknownModel, UnknownWorker, JobTimeout, JobFailed."""
        commands = self._core.commands
        begun = commands.send("cellama_evict", {"model_id": model_id}, Whom(worker, pool), model_id)

        def status(entry: WorkerEntry) -> str | None:
            return "evicted" if entry.evicted.get(model_id, 0.0) >= begun.get(entry.name, 0.0) else None

        commands.wait_for_status(begun, evicting_key(model_id), status, "evicted", timeout)
