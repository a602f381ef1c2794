"""Who asks, and what they may: the one seam between the endpoints and whatever keeps keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from cellama.tasks.contract.fields import Adapters
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import PRIORITY_BULK, PRIORITY_INTERACTIVE

from .errors import ApiError

TIERS = {"flex": PRIORITY_BULK, "default": PRIORITY_INTERACTIVE, "priority": 0}  # service tiers, the least urgent first
_ADAPTERS: TypeAdapter[tuple[tuple[str, float], ...] | None] = TypeAdapter(Adapters)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from.

    `tenant` is the scope of prefixes, keys and ids; None: the one of whoever has no key. `models` are the ids that may
    be asked for, None: all. `priority` is a service tier (`TIERS`): that of requests that name none, and the most
    urgent one that they may name; None: "default", and any. `max_tokens` are all that a request may read and generate.
    `adapters` are the LoRA adapters that a request may name; None: all.
    """

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None
    priority: str | None = None
    max_tokens: int | None = None
    adapters: frozenset[str] | None = None

    def may_ask(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raises ApiError (403) for a model that it may not ask for, whether there is one of that name or not."""
        if not self.may_ask(model):
            allowed = ", ".join(sorted(self.models or ()))
            raise ApiError(
                403,
                f"this API key may not ask for the model {shorten(model)}; it may ask for: {allowed}",
                code="model_not_allowed",
                param="model",
            )

    def check_adapters(self, choice: Any) -> None:
        """Raise ApiError (403) if a body's `adapters` name one that is not allowed, whether it is loaded or not.

        A value that is not valid is left to the job's payload, which refuses it by name.
        """
        if (name := self.adapter_not_allowed(choice)) is not None:
            allowed = ", ".join(sorted(self.adapters or ())) or "none"
            raise ApiError(
                403,
                f"this API key may not use the adapter {shorten(name)}; it may use: {allowed}",
                code="adapter_not_allowed",
                param="adapters",
            )

    def adapter_not_allowed(self, choice: Any) -> str | None:
        """Return the first adapter of a body's `adapters` that is not allowed, or None."""
        if self.adapters is None or choice is None:
            return None
        try:
            chosen = _ADAPTERS.validate_python(choice) or ()
        except ValidationError:
            return None
        return next((name for name, _ in chosen if name not in self.adapters), None)

    @property
    def light_priority(self) -> int:
        """The queue priority of jobs that take no slot: the most urgent one that the caller may ask for."""
        return TIERS[self.priority or "priority"]

    def tier(self, wanted: str | None) -> str:
        """The service tier that a request gets which names this one, "auto", or none."""
        if wanted in (None, "auto"):
            return self.priority or "default"
        most = self.priority or "priority"
        return max(wanted or "", most, key=lambda tier: TIERS[tier])


class Admission(Protocol):
    """A request that is being handled, and was charged. `headers` go with its answer (`x-ratelimit-…`)."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Charge what the request's jobs may take: they may read and generate about `num_tokens`; `num_jobs` are its
        prompts, each as often as it asks for choices. Raises ApiError (429)."""
        ...

    async def end(self, num_tokens: int | None) -> None:
        """Called once when its jobs have ended, however they did, with the tokens that they read and generated; None:
        that can't be known, so as many as they might."""
        ...


class Access(Protocol):
    """Lets requests in, or raises ApiError (401, 403, 429)."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who it is. The names of `headers` are in small letters."""
        ...

    async def admit(self, caller: Caller) -> Admission:
        """Charge a request of this caller, before anything of its body is read. Raises ApiError (429)."""
        ...

    async def close(self) -> None:
        """Gives connections back."""
        ...


@dataclass(frozen=True, slots=True)
class Unlimited:
    """The admission of whoever has no limits."""

    headers: Mapping[str, str] = field(default_factory=dict)

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Nothing is counted."""

    async def end(self, num_tokens: int | None) -> None:
        """Nothing is counted."""


class NoKeys:
    """Every request is let in, as one caller without a tenant. For loopback, or behind another app."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        return Caller()

    async def admit(self, caller: Caller) -> Admission:
        return Unlimited()

    async def close(self) -> None:
        """There is nothing to close."""


_WITHOUT = "without keys only this machine is served, and the request"
MAKE_ONE = "make a key (`cellama keys create TENANT`)"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # headers of requests that came through a proxy


class LoopbackOnly(NoKeys):
    """As NoKeys, for requests that were sent to this machine by its own name: a page in a browser that has its own
    name point to 127.0.0.1 reads nothing. Nor does whoever comes through a proxy that says so."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise ApiError(403, f"{_WITHOUT} was sent to {shorten(host)}; ask 127.0.0.1, or {MAKE_ONE}")
        if any(name in headers for name in _FORWARDED):
            raise ApiError(403, f"{_WITHOUT} came through a proxy; {MAKE_ONE}")
        return await super().authenticate(headers)


def _name_of(host: str) -> str:
    """The name in a `Host` header, without its port; "" if that is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
