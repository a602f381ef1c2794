"""What a worker was given at run time: models, adapters and their scales, the default.

Its successor of the same name, after a crash or a restart, brings it back. What the settings say is not stored: the
successor reads them, too.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from cellama.config import ModelSettings
from cellama.tasks.contract.keys import wanted_key

log = logging.getLogger(__name__)

KEPT_S = 30 * 86400  # after the last sign of the worker
RENEWED_S = 3600.0

AdapterChoices = dict[str, tuple[str, float]]  # source and scale by name


@dataclass(frozen=True, slots=True)
class Wanted:
    """`models` were loaded by command, with the adapters that they have; `adapters` are of models of the settings."""

    models: tuple[ModelSettings, ...] = ()
    adapters: dict[str, AdapterChoices] = field(default_factory=dict)  # by id of the model
    default: str | None = None  # None: as the settings say

    def to_json(self) -> str:
        """Without tokens of the hub: the file is in its cache, or HF_TOKEN is set."""
        models = [model.model_dump(mode="json", exclude={"hub_token"}, exclude_unset=True) for model in self.models]
        return json.dumps({"models": models, "adapters": self.adapters, "default": self.default})


def wanted_of_json(text: str | bytes) -> Wanted:
    """What was stored; without models that this version does not understand."""
    stored: dict[str, Any] = json.loads(text)
    models = []
    for model in stored["models"]:
        try:
            models.append(ModelSettings(**model))
        except ValidationError as error:
            log.error("model %s is not brought back: %s", model.get("id"), error)
    adapters = {
        model_id: {name: (source, scale) for name, (source, scale) in choices.items()}
        for model_id, choices in stored["adapters"].items()
    }
    return Wanted(tuple(models), adapters, stored["default"])


class WantedKeeper:
    """Keeps the stored set in step with what is there. Safe from any thread."""

    def __init__(self, redis: Redis, worker: str) -> None:
        self._redis = redis
        self._key = wanted_key(worker)
        self._current: Callable[[], Wanted] | None = None  # as long as it is being brought back
        self._lock = threading.Lock()
        self._saved: str | None = None  # None: unknown
        self._next_at = 0.0  # monotonic

    def read(self) -> Wanted:
        """What the predecessor had. Raises RedisError."""
        stored: Any = self._redis.get(self._key)
        return wanted_of_json(stored) if stored else Wanted()

    def keep(self, current: Callable[[], Wanted]) -> None:
        """From now on `current` tells what is to be stored."""
        self._current = current
        self.save()

    def save(self) -> None:
        """Stores what is there; if Redis is away, `look` does so later."""
        try:
            self.look()
        except RedisError as error:
            log.warning("what was loaded is stored once Redis answers: %s", error)

    def look(self) -> None:
        """Stores what has changed, and renews the time for which it is kept. Raises RedisError."""
        if self._current is None:
            return
        with self._lock:
            wanted = self._current()
            text = "" if wanted == Wanted() else wanted.to_json()
            if text == self._saved and time.monotonic() < self._next_at:
                return
            if text:
                self._redis.set(self._key, text, ex=KEPT_S)
            else:
                self._redis.delete(self._key)
            self._saved, self._next_at = text, time.monotonic() + RENEWED_S
