"""What a worker process runs on: models, publisher, registry entry. One per process, made by the lifecycle."""

from __future__ import annotations

import logging

from redis import Redis

from cellama.config import ModelSettings, Settings
from cellama.engine import EngineOptions, ModelManager

from .publisher import Publisher
from .registry import Registration

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 10
NOT_OPTIONS = {"id", "source", "default", "capabilities"}


class Runtime:
    """Owns the models and the threads that serve them, from the start of a worker to its end."""

    def __init__(self, settings: Settings, worker: str) -> None:
        """Loads all models of the settings. Raises ModelLoadFailed, InvalidRequest; nothing is left then."""
        self.settings = settings
        self.manager = ModelManager()
        try:
            for model in settings.models:
                self._load(model)
        except Exception:
            self.manager.close()
            raise
        redis = Redis.from_url(settings.redis_url, socket_timeout=SOCKET_TIMEOUT_S, health_check_interval=10)
        self.publisher = Publisher(redis, settings, worker)
        for model_id, loaded in self.manager.models().items():
            if loaded.capabilities & {"generate", "chat"}:
                loaded.engine.add_listener(self.publisher.listener(model_id))
        self._registration = Registration(redis, worker, self.manager)
        self._redis = redis

    def _load(self, model: ModelSettings) -> None:
        options = EngineOptions(**model.model_dump(exclude=NOT_OPTIONS))
        self.manager.load(
            model.id,
            model.source,
            options=options,
            capabilities=model.capabilities,
            default=model == self.settings.default_model,
        )

    def close(self) -> None:
        """Ends everything in order: nobody is told of a worker that is gone, no event is lost."""
        self._registration.close()
        self.manager.close()
        if not self.publisher.close():
            log.error("the publisher did not end: Redis does not answer")
        self._redis.close()
