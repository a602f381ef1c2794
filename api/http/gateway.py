"""The state shared by all of an app's endpoints: clients, the model list, memory for bodies, and request counts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from starlette.requests import Request

from cellama.api.client.async_client import AsyncClient
from cellama.api.client.registry_views import ClassStats, Stats
from cellama.config import Settings
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect_async
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import JobError
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL, class_of_priority
from cellama.tasks.contract.shapes.workers import ModelView
from cellama.tasks.metrics.figures import OTHER, Bounded, Figures, Meter
from cellama.tasks.state.ledger import arguments_of_ahead
from cellama.tasks.state.registry import WorkerEntry, is_served
from cellama.tasks.state.scripts import source

from .auth import TIERS, Access, Caller
from .errors import RETRY_AFTER_S, ApiError

FRESH_S = 1.0  # maximum age of the list of models, so that loads and unloads are noticed within a second
WAITS_FRESH_S = 3.0  # maximum age of estimated waits: computing them takes time, and a queue changes little within 3 s
START_S = 5.0  # for clients, if no worker runs: about the time that a worker takes to start
BUSY_RETRY_S = 1.0  # for clients: the time at which another request ends is unknown
METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
TOKENS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "generated": "completion_tokens"}
EVERY_MODEL = Caller()

T = TypeVar("T")


class Cached(Generic[T]):
    """A cached value that is fetched again when it is older than `fresh_s`.

    Concurrent callers share one fetch. During a fetch, callers receive the previous value unless it is older than twice
    `fresh_s`. Under steady traffic, no caller therefore has to wait.
    """

    def __init__(self, fetch: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty cache. Tests may replace `clock`."""
        self._fetch = fetch
        self._clock = clock
        self._fetching: asyncio.Future[T] | None = None
        self._fetched_at = 0.0
        self._last: tuple[float, T] | None = None  # start of the last successful fetch, and its value

    async def get(self, fresh_s: float = FRESH_S) -> T:
        """Return the value. If the fetch fails, raise its error.

        After an error, the next caller fetches the value again.
        """
        now = self._clock()
        if self._fetching is None or (self._fetching.done() and now - self._fetched_at > fresh_s):
            self._fetched_at = now
            self._fetching = asyncio.ensure_future(self._fetch())
            self._fetching.add_done_callback(partial(self._store, now))
        if self._last is not None and now - self._last[0] <= 2 * fresh_s:
            return self._last[1]
        return await asyncio.shield(self._fetching)

    def _store(self, started_at: float, fetching: asyncio.Future[T]) -> None:
        if not fetching.cancelled() and fetching.exception() is None:
            self._last = started_at, fetching.result()
        elif self._fetching is fetching:
            self._fetching = None


class BodyMemory:
    """Limits the memory for request bodies, in total and per key. Use this class only in the event loop."""

    def __init__(self, max_bytes: int, max_key_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_key_bytes = max_key_bytes
        self._of_keys: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """The number of reserved bytes."""
        return self._of_keys.total()

    def take(self, holder: str, num_bytes: int, held_bytes: int) -> None:
        """Reserve memory for a request that already holds `held_bytes`.

        If no other request holds memory, the request is always admitted. Raises ApiError (429 if the key's requests
        hold too much memory, 503 if all requests together hold too much).
        """
        of_key, of_all = self._of_keys[holder], self.num_bytes
        if of_key > held_bytes and of_key + num_bytes > self._max_key_bytes:
            raise ApiError(
                429,
                f"the bodies of this key's requests use {of_key} bytes of memory, and the limit is "
                f"{self._max_key_bytes} (gateway_key_bodies_bytes); retry when other requests have finished",
                code="too_many_bytes",
                retry_after_s=BUSY_RETRY_S,
            )
        if of_all > held_bytes and of_all + num_bytes > self._max_bytes:
            raise ApiError(
                503,
                f"the bodies of all requests use {of_all} bytes of memory, and the limit is {self._max_bytes} "
                "(gateway_bodies_bytes); retry shortly",
                code="overloaded",
                retry_after_s=BUSY_RETRY_S,
            )
        self._of_keys[holder] += num_bytes

    def give_back(self, holder: str, num_bytes: int) -> None:
        self._of_keys[holder] -= num_bytes
        if not self._of_keys[holder]:
            del self._of_keys[holder]


class RequestCounts:
    """Counts requests and tokens since the app was created, for Prometheus. Use this class only in the event loop."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._tenants = Bounded()
        self.num_in_flight = 0

    def count_request(
        self, route: str, method: str, status: str, first_byte_s: float | None, duration_s: float
    ) -> None:
        """Count a finished request. `first_byte_s` is None if no byte of the response was sent."""
        known = method if method in METHODS else OTHER
        self._meter.count("cellama_http_requests_total", route, known, status)
        self._meter.observe("cellama_http_request_seconds", duration_s, route)
        if first_byte_s is not None:
            self._meter.observe("cellama_http_first_byte_seconds", first_byte_s, route)

    def count_tokens(self, tenant: str | None, usages: Iterable[Mapping[str, Any]]) -> None:
        """Count the tokens that the jobs of a tenant's request prefilled and generated."""
        name = self._tenants.of(tenant or "")
        for usage in usages:
            for kind, field in TOKENS.items():
                self._meter.count("cellama_tenant_tokens_total", name, kind, by=usage.get(field) or 0)

    def figures(self) -> Figures:
        """Return the current values of all counts."""
        figures = Figures()
        self._meter.add_to(figures)
        figures.add("cellama_http_requests_in_flight", self.num_in_flight)
        figures.add("cellama_label_values_dropped_total", self._tenants.num_dropped, "tenant")
        return figures


class Gateway:
    """Holds the clients and caches shared by all requests of an app.

    Clients are created when they are first needed, because an app that mounts the gateway may not run the gateway's
    lifespan.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings = settings
        self.access = access
        self.counts = RequestCounts()
        self.body_memory = BodyMemory(settings.gateway_bodies_bytes, settings.gateway_key_bodies_bytes)
        self._models: Cached[list[ModelView]] = Cached(lambda: self.client.models())
        self._stats: Cached[Stats] = Cached(lambda: self.client.stats())
        self._workers: Cached[list[WorkerEntry]] = Cached(lambda: self.client.workers())
        self._afterwards: dict[asyncio.Task[None], bool] = {}  # task → whether `close` cancels it

    @cached_property
    def client(self) -> AsyncClient:
        return AsyncClient(self.settings.redis_url)

    @cached_property
    def redis(self) -> Redis:
        """A client for the gateway's own data, such as records of responses."""
        return connect_async(self.settings.redis_url, socket_connect_timeout=CONNECT_TIMEOUT_S)

    @cached_property
    def _ahead(self) -> AsyncScript:
        return self.redis.register_script(source("ahead"))

    async def models(self, caller: Caller, fresh_s: float = FRESH_S) -> list[ModelView]:
        """Return the models that the caller may use, and that are ready or loaded on demand."""
        views = await self._models.get(fresh_s)
        return [view for view in views if is_served(view) and caller.may_use_model(view["id"])]

    async def listed_models(self, caller: Caller) -> list[ModelView]:
        """Return the ready models that the caller may use, followed by their aliases as separate entries."""
        views = await self.models(caller)
        named = {DEFAULT_MODEL if view["default"] else view["id"]: view for view in views}
        named |= {view["id"]: view for view in views}
        aliases = self.settings.model_aliases.items()
        return views + [{**named[model], "id": alias} for alias, model in aliases if model in named]

    async def find_model(self, caller: Caller, name: object) -> ModelView:
        """Return the model with this name. Raises ApiError (400, 403, 404, or 503 if no worker is running)."""
        if not isinstance(name, str) or not name:
            raise ApiError(400, f"model is {shorten(name)}; use one of the models listed by /v1/models", param="model")
        name = self.settings.model_aliases.get(name, name)
        caller.check_model(name)
        for fresh_s in (FRESH_S, 0.0):  # the model may have been loaded a moment ago
            for view in await self.models(EVERY_MODEL, fresh_s):
                if view["id"] == name or (name == DEFAULT_MODEL and view["default"]):
                    return view
        if not await self._models.get():
            raise ApiError(
                503, "no worker is running; start one with `cellama worker`", code="no_worker", retry_after_s=START_S
            )
        known = ", ".join(view["id"] for view in await self.models(caller)) or "none"
        raise ApiError(
            404, f"model: {shorten(name)} is not served; running models: {known}", code="model_not_found", param="model"
        )

    async def stats(self) -> Stats:
        """Return the slots, token rates and queues of all workers.

        Under steady traffic, the values are up to WAITS_FRESH_S old.
        """
        return await self._stats.get(WAITS_FRESH_S)

    async def workers(self) -> list[WorkerEntry]:
        """Return the running workers, as reported in their last heartbeats."""
        return await self._workers.get()

    async def wait_s(self, model: str, tier: str) -> float:
        """Estimate how many seconds a new job of this service tier will wait for a slot."""
        classes = (await self.stats())["classes"].get(model)
        return 0.0 if classes is None else classes[class_of_priority(TIERS[tier])]["eta_s"] or 0.0

    async def wait_of(self, job_id: str, model: str, tier: str) -> str | None:
        """Return the position and the estimated wait of a job as text, or None if the job is not waiting.

        The call runs one Redis script. The estimate is derived from the cached estimate for a new job.
        """
        try:
            with reaching_redis():
                keys, args = arguments_of_ahead(job_id)
                ahead: Any = await self._ahead(keys=keys, args=args)
            if ahead is None:
                return None
            classes = (await self.stats())["classes"].get(model, {})
        except JobError:  # the stream itself reports an outage that lasts
            return None
        eta_s = wait_at(ahead[0], classes, class_of_priority(TIERS[tier]))
        about = "" if eta_s is None else f", about {math.ceil(eta_s)} s"
        return f"position {ahead[0] + 1}{about}"

    async def with_wait(self, error: ApiError, model: str, tier: str) -> ApiError:
        """Return the error. If clients may retry, the error's retry time is set to the estimated wait for a slot."""
        if error.retry_after_s is not None:
            error.retry_after_s = max(RETRY_AFTER_S, await self.wait_s(model, tier))
        return error

    def afterwards(self, work: Coroutine[Any, Any, object], *, until_close: bool = False) -> None:
        """Run a coroutine to completion, even if its request is cancelled.

        Job errors are ignored. `close` waits for the coroutine to finish, or cancels it if `until_close` is set.
        """

        async def do() -> None:
            with contextlib.suppress(JobError):
                await work

        task = asyncio.create_task(do())
        self._afterwards[task] = until_close
        task.add_done_callback(self._afterwards.pop)

    async def close(self) -> None:
        """Finish the coroutines started by `afterwards`, and close the connections."""
        for task, until_close in self._afterwards.items():
            if until_close:
                task.cancel()
        while self._afterwards:
            await asyncio.wait(self._afterwards)
        await self.access.close()
        if "redis" in self.__dict__:
            await self.redis.aclose()
        if "client" in self.__dict__:
            await self.client.close()


def wait_at(rank: int, classes: Mapping[str, ClassStats], name: str) -> float | None:
    """Return the estimated wait of a job with `rank` jobs ahead of it, or None if the wait is unknown.

    `classes` contains the waiting jobs for the job's model, grouped by priority class, and `name` is the job's class.
    """
    eta_s = classes[name]["eta_s"] if name in classes else None
    if eta_s is None:
        return None
    before_new = sum(classes[each]["waiting"] for each in list(CLASSES)[: list(CLASSES).index(name) + 1])
    return eta_s * min(1.0, (rank + 1) / (before_new + 1))


def gateway_of(request: Request) -> Gateway:
    """Return the gateway object of the app that handles the request."""
    gateway: Gateway = request.app.state.gateway
    return gateway
