"""Which live workers serve which model, as a run sees it."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable

from redis import Redis

from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import UnknownModel
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.state.registry import live_workers

TEXTS_AT_ONCE = 256  # that a worker without slots is given
MODEL_PATIENCE_S = 30.0  # that lines wait for a model which no live worker serves, and none has served before


def check_model(redis: Redis, model: str | None) -> None:
    """Raises UnknownModel for a model that no worker has, while some live: a typo is told before anything is read."""
    with reaching_redis():
        workers = live_workers(redis)
    known = sorted({entry["id"] for worker in workers for entry in worker.models})
    if not known or model in (None, DEFAULT_MODEL, *known):
        return
    close = difflib.get_close_matches(str(model), known, n=1)
    hint = f"did you mean {close[0]!r}" if close else f"they have: {', '.join(known)}"
    raise UnknownModel(f"no live worker has a model {model!r}; {hint}, or load it with `cellama models load`")


class Serving:
    """What was seen at the last look."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._models: dict[str, tuple[int, int]] = {}  # → live workers, slots of one
        self._seen: set[str] = set()
        self._missed_since: dict[str, float] = {}

    def look(self, wanted: Iterable[str]) -> None:
        """Reads the registry; `wanted` are the models that lines wait for."""
        workers = live_workers(self._redis)
        self._models = {}
        for worker in workers:
            for model in worker.models:
                if model["status"] == "loading":
                    self._seen.add(model["id"])
                if model["status"] == "ready":
                    slots = model["engine"]["slots_total"] if model["engine"] else TEXTS_AT_ONCE
                    for name in {model["id"], DEFAULT_MODEL if model["default"] else model["id"]}:
                        count, most = self._models.get(name, (0, 0))
                        self._models[name] = (count + 1, max(most, slots))
        self._seen |= self._models.keys()
        now = time.monotonic()
        missed = [model for model in wanted if model not in self._seen] if workers else []
        self._missed_since = {model: self._missed_since.get(model, now) for model in missed}

    @property
    def num_workers(self) -> int:
        """Those that serve the model which most of them serve."""
        return max((count for count, _ in self._models.values()), default=0)

    def of(self, model: str) -> tuple[int, int]:
        """Live workers that serve a model, and how many lines one of them runs at once."""
        return self._models.get(model, (0, 0))

    def unknown(self) -> dict[str, UnknownModel]:
        """Models that no worker will serve, it seems: workers live, and none has had them for a good while."""
        until = time.monotonic() - MODEL_PATIENCE_S
        there = ", ".join(sorted(name for name in self._models if name != DEFAULT_MODEL)) or "none"
        return {
            model: UnknownModel(
                f"no worker serves model {model!r}; they serve: {there}. Load it (`cellama models load`), or correct "
                "the line; then `cellama batch resume OUT --retry-failed`"
            )
            for model, since in self._missed_since.items()
            if since <= until
        }
