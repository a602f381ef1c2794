"""Which models are served, and how long their queues are: as of a moment ago, however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from cellama.api.client.async_client import AsyncClient
from cellama.api.client.registry_views import Stats
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import DEFAULT_MODEL, class_of_priority
from cellama.tasks.contract.shapes.workers import ModelView

from .callers import TIERS, Caller
from .errors import RETRY_AFTER_S, ApiError

FRESH_S = 1.0
WAITS_FRESH_S = 3.0  # estimates are played through, which takes time
START_S = 5.0  # where no worker is there, one may be in so long

EVERY_MODEL = Caller()

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that is asked for again when it is older than `fresh_s`, once for all who want it. Meanwhile they get the
    one before, unless that is twice as old: what comes all the time never waits."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is for tests."""
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Future[T] | None = None
        self._asked_at = 0.0
        self._told: tuple[float, T] | None = None  # when it was asked for, and the last answer

    async def get(self, fresh_s: float = FRESH_S) -> T:
        """Raises what asking does; the next one asks again then."""
        now = self._clock()
        if self._asking is None or (self._asking.done() and now - self._asked_at > fresh_s):
            self._asked_at = now
            self._asking = asyncio.ensure_future(self._ask())
            self._asking.add_done_callback(partial(self._note, now))
        if self._told is not None and now - self._told[0] <= 2 * fresh_s:
            return self._told[1]
        return await asyncio.shield(self._asking)

    def _note(self, asked_at: float, asking: asyncio.Future[T]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._told = asked_at, asking.result()
        elif self._asking is asking:
            self._asking = None


class Directory:
    """What the registry says."""

    def __init__(self, client: AsyncClient) -> None:
        self._models: Kept[list[ModelView]] = Kept(client.models)
        self._stats: Kept[Stats] = Kept(client.stats)

    async def models(self, caller: Caller, fresh_s: float = FRESH_S) -> list[ModelView]:
        """Those that are ready, and that the caller may ask for."""
        views = await self._models.get(fresh_s)
        return [view for view in views if view["status"] == "ready" and caller.may_ask(view["id"])]

    async def find(self, caller: Caller, name: object) -> ModelView:
        """The model of that name. Raises ApiError: 400, 403, 404, or 503 where no worker is there at all."""
        if not isinstance(name, str) or not name:
            raise ApiError(400, f"model is {shorten(name)}; name one that is served, see /v1/models", param="model")
        caller.check_model(name)
        for fresh_s in (FRESH_S, 0.0):  # one that was loaded just now
            for view in await self.models(EVERY_MODEL, fresh_s):
                if view["id"] == name or (name == DEFAULT_MODEL and view["default"]):
                    return view
        if not await self._models.get():
            raise ApiError(503, "no worker is running; start one", code="no_worker", retry_after_s=START_S)
        known = ", ".join(view["id"] for view in await self.models(caller)) or "none"
        raise ApiError(
            404, f"no model {shorten(name)} is served; there are: {known}", code="model_not_found", param="model"
        )

    async def wait_s(self, model: str, tier: str) -> float:
        """Return about how many seconds a new job of a service tier waits for a slot."""
        classes = (await self._stats.get(WAITS_FRESH_S))["classes"].get(model)
        return 0.0 if classes is None else classes[class_of_priority(TIERS[tier])]["eta_s"] or 0.0

    async def with_wait(self, error: ApiError, model: str, tier: str) -> ApiError:
        """The error, with the time after which it may pass."""
        if error.retry_after_s is not None:
            error.retry_after_s = max(RETRY_AFTER_S, await self.wait_s(model, tier))
        return error
