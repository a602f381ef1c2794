"""Manage API keys and show tenants. Only administrators see this page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from cellama.api.http.batches.runner import BatchRunner
from cellama.api.http.errors import ApiError, not_found
from cellama.api.http.gateway import EVERY_MODEL, Gateway, gateway_of
from cellama.api.keys.entry import KeyEntry
from cellama.api.keys.managing import InvalidKeyField, as_toml, create_key, revoke_key, seconds_of
from cellama.api.keys.store import KeyFile, KeyLookup, KeyStore
from cellama.config.logging import event_logger
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.state.job_list import JobFilter, find_jobs

from .forms import form_of
from .rendering import page
from .session import base_of, console_caller, require_admin
from .visible import visible

log = event_logger(__name__)

KEYS = "/console/keys"
MAX_COUNTED_JOBS = 2000  # running jobs, and as many waiting ones: counting them takes Redis about 10 ms
_NUMBERS = ("requests_per_minute", "tokens_per_minute", "concurrent_jobs")
_LISTS = ("models", "adapters")


@dataclass(frozen=True, slots=True)
class ConsoleTenant:
    """A tenant with its keys and its current jobs and runs. The name "" stands for jobs and runs without a tenant."""

    name: str
    num_active_keys: int
    num_keys: int
    num_open_jobs: int
    num_open_runs: int


async def show(request: Request) -> Response:
    """Handle `GET /console/keys`."""
    await _admin(request)
    return await _keys_page(request)


async def create(request: Request) -> Response:
    """Handle `POST /console/keys`. The response is the only page that shows the key's secret."""
    caller = await _admin(request)
    gateway, form = gateway_of(request), await form_of(request)
    file = gateway.settings.gateway_keys_file
    try:
        lifetime_s = seconds_of(form["expires_in"]) if form.get("expires_in") else None
        fields = _fields(form)
        with reaching_redis():
            key, entry = await create_key(_store(gateway), fields, lifetime_s, is_stored=file is None)
    except InvalidKeyField as error:
        return await _keys_page(request, status=400, problem=str(error), form=form)
    log.info("API key created", key=entry.id, tenant=entry.tenant, by=caller)
    entry_text = None if file is None else as_toml(entry)
    return await _keys_page(request, status=201, secret=key.text, created=entry, entry_text=entry_text)


async def revoke(request: Request) -> Response:
    """Handle `POST /console/keys/{id}/revoke`."""
    caller = await _admin(request)
    gateway, key_id = gateway_of(request), request.path_params["id"]
    if gateway.settings.gateway_keys_file is not None:
        message = "keys in a file can't be revoked here; delete the entry in the file, or set its revoked_at"
        raise ApiError(409, message, code="keys_in_file")
    with reaching_redis():
        revoked = await revoke_key(_store(gateway), key_id)
    if revoked.entry is None:
        raise not_found("API key", key_id)
    log.info("API key revoked", key=key_id, tenant=revoked.entry.tenant, by=caller)
    return RedirectResponse(f"{base_of(request)}/keys", 303)


async def _admin(request: Request) -> str:
    """Return the id of the administrator's key. Raises ApiError (403) if the visitor is not an administrator."""
    caller = await console_caller(request)
    require_admin(caller)
    return caller.key_id or "this machine"


async def _keys_page(
    request: Request,
    *,
    status: int = 200,
    problem: str = "",
    form: Mapping[str, str] | None = None,
    secret: str = "",
    created: KeyEntry | None = None,
    entry_text: str | None = None,
) -> Response:
    gateway = gateway_of(request)
    with reaching_redis():
        found = await _store(gateway).all()
    views = await gateway.models(EVERY_MODEL)
    return page(
        request,
        "keys.html",
        status=status,
        keys=[_key_view(key) for key in found],
        tenants=await _tenants(gateway, request.app.state.batches, found),
        models=sorted(view["id"] for view in views),
        problem=problem,
        form=defaultdict(str, form or {}),
        secret=secret,
        created=created,
        entry_text=entry_text,
        keys_file=gateway.settings.gateway_keys_file,
        max_counted=MAX_COUNTED_JOBS,
    )


def _store(gateway: Gateway) -> KeyStore:
    file = gateway.settings.gateway_keys_file
    return KeyStore(gateway.redis, None if file is None else KeyFile(file))


def _fields(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a key's entry. Empty form fields are set to their defaults. Raises InvalidKeyField."""
    fields: dict[str, Any] = {
        "tenant": form.get("tenant", ""),
        "name": form.get("name", ""),
        "priority": form.get("priority") or None,
        "admin": form.get("admin") == "on",
    }
    for name in _LISTS:
        given = [part.strip() for part in form.get(name, "").split(",") if part.strip()]
        fields[name] = given or None
    for name in _NUMBERS:
        text = form.get(name, "")
        if text and not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise InvalidKeyField(f"{name} is {text[:40]!r}; it must be a whole number, or empty for no limit")
        fields[name] = int(text) if text else None
    return fields


def _key_view(found: KeyLookup) -> dict[str, Any]:
    entry = found.entry
    assert entry is not None
    return {
        "entry": entry,
        "name": visible(entry.name),
        "models": ", ".join(sorted(entry.models or ())) or "all",
        "adapters": "all" if entry.adapters is None else ", ".join(sorted(entry.adapters)) or "none",
        "limits": list(_limits(entry)),
        "state": entry.state(found.now),
        "used_at": found.used_at,
        "expires_at": None if entry.expires_at is None else entry.expires_at.timestamp(),
    }


def _limits(entry: KeyEntry) -> Iterator[str]:
    units = zip(_NUMBERS, ("requests/min", "tokens/min", "jobs at a time"), strict=True)
    yield from (f"{limit} {unit}" for name, unit in units if (limit := getattr(entry, name)) is not None)


async def _tenants(gateway: Gateway, runner: BatchRunner, found: Sequence[KeyLookup]) -> list[ConsoleTenant]:
    """Return the tenants that have keys, open jobs or open runs, sorted by name."""
    num_runs = Counter(tenant or "" for _, tenant, _ in await runner.batches.open_batches())
    num_jobs: Counter[str] = Counter()
    with reaching_redis():
        for state in ("running", "waiting"):
            jobs = await find_jobs(gateway.redis, JobFilter(state=state), MAX_COUNTED_JOBS)
            num_jobs.update(job.tenant for job in jobs.jobs)
    num_keys = Counter(key.entry.tenant for key in found if key.entry is not None)
    num_active = Counter(key.entry.tenant for key in found if key.entry and key.entry.state(key.now) == "active")
    return [
        ConsoleTenant(
            name=name,
            num_active_keys=num_active[name],
            num_keys=num_keys[name],
            num_open_jobs=num_jobs[name],
            num_open_runs=num_runs[name],
        )
        for name in sorted({*num_keys, *num_jobs, *num_runs})
    ]


ROUTES = (
    Route(KEYS, show, methods=["GET"]),
    Route(KEYS, create, methods=["POST"]),
    Route(KEYS + "/{id}/revoke", revoke, methods=["POST"]),
)
