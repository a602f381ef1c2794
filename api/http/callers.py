"""Who asks, and what they may: the one seam between the endpoints and whatever keeps keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import PRIORITY_BULK, PRIORITY_INTERACTIVE

from .errors import ApiError

TIERS = {"flex": PRIORITY_BULK, "default": PRIORITY_INTERACTIVE, "priority": 0}  # service tiers, the least urgent first


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from.

    `tenant` is the scope of prefixes, keys and ids; None: the one of whoever has no key. `models` are the ids that may
    be asked for, None: all. `priority` is a service tier (`TIERS`): that of requests that name none, and the most
    urgent one that they may name; None: "default", and any. `max_tokens` are all that a request may read and generate.
    """

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None
    priority: str | None = None
    max_tokens: int | None = None

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

    def tier(self, wanted: str | None) -> str:
        """The service tier that a request gets which names this one, "auto", or none."""
        if wanted in (None, "auto"):
            return self.priority or "default"
        most = self.priority or "priority"
        return max(wanted or "", most, key=lambda tier: TIERS[tier])


class Admission(Protocol):
    """A request that may run. `headers` go with its answer (`x-ratelimit-…`)."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def end(self, num_tokens: int | None) -> None:
        """Called once when its jobs have ended, however they did, with the tokens that they read and generated; None:
        that can't be known, so as many as they might."""
        ...


class Access(Protocol):
    """Lets requests in, or raises ApiError (401, 403, 429)."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Who it is. The names of `headers` are in small letters."""
        ...

    async def admit(self, caller: Caller, model: str, num_tokens: int, num_jobs: int = 1) -> Admission:
        """Counts the request against the caller's limits. It may read and generate about `num_tokens`; `num_jobs` are
        its prompts, each as often as it asks for choices."""
        ...

    async def close(self) -> None:
        """Gives connections back."""
        ...


@dataclass(frozen=True, slots=True)
class Unlimited:
    """The admission of whoever has no limits."""

    headers: Mapping[str, str] = field(default_factory=dict)

    async def end(self, num_tokens: int | None) -> None:
        """Nothing is counted."""


class NoKeys:
    """Every request is let in, as one caller without a tenant. For loopback, or behind another app."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        return Caller()

    async def admit(self, caller: Caller, model: str, num_tokens: int, num_jobs: int = 1) -> Admission:
        return Unlimited()

    async def close(self) -> None:
        """There is nothing to close."""


_WITHOUT = "without keys only this machine is served, and the request"
_MAKE_ONE = "make a key (`cellama keys create TENANT`)"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # headers of requests that came through a proxy


class LoopbackOnly(NoKeys):
    """As NoKeys, for requests that were sent to this machine by its own name: a page in a browser that has its own
    name point to 127.0.0.1 reads nothing. Nor does whoever comes through a proxy that says so."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise ApiError(403, f"{_WITHOUT} was sent to {shorten(host)}; ask 127.0.0.1, or {_MAKE_ONE}")
        if any(name in headers for name in _FORWARDED):
            raise ApiError(403, f"{_WITHOUT} came through a proxy; {_MAKE_ONE}")
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
