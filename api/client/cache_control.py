"""What workers have in their caches: looks that no engine is waited for."""

from __future__ import annotations

from cellama.tasks.contract.errors import UnknownModel
from cellama.tasks.contract.shapes.workers import CacheHit

from .core import Core


class CacheControl:
    """The KV caches of models on running workers."""

    _core: Core

    def last_cache_hit(self, model_id: str) -> dict[str, CacheHit | None]:
        """By worker: what the job that got a slot of the model last took over of its prompt; None before the first. As
        the last heartbeats told it. Raises UnknownModel."""
        found = {w.name: m.get("last_cache_hit") for w in self._core.workers() for m in w.models if m["id"] == model_id}
        if not found:
            raise UnknownModel(f"no live worker has a model {model_id!r}; `cellama models list` shows what there is")
        return found
