"""Authenticate and admit requests. This module is the interface between the endpoints and a store of API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import PRIORITY_BULK, PRIORITY_INTERACTIVE
from cellama.tasks.contract.payloads import Adapters

from .errors import ApiError

TIERS = {"flex": PRIORITY_BULK, "default": PRIORITY_INTERACTIVE, "priority": 0}  # service tiers, the least urgent first
_ADAPTERS: TypeAdapter[tuple[tuple[str, float], ...] | None] = TypeAdapter(Adapters)


@dataclass(frozen=True, slots=True)
class Caller:
    """A request's sender and the sender's rights.

    `tenant` is the scope of prefixes, idempotency keys and ids. All callers without a key share the scope None.
    `models` contains the ids of the models that the caller may use, or is None for all models. `priority` is the
    service tier (`TIERS`) of requests that don't specify a tier, and no request may use a more urgent tier. If
    `priority` is None, requests without a tier use "default", and all tiers are allowed. `max_tokens` limits the tokens
    that one request may prefill and generate. `adapters` contains the LoRA adapters that a request may use, or is None
    for all adapters.
    """

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None
    priority: str | None = None
    max_tokens: int | None = None
    adapters: frozenset[str] | None = None

    def may_use_model(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise ApiError (403) for a model that the caller may not use, whether or not that model exists."""
        if not self.may_use_model(model):
            allowed = ", ".join(sorted(self.models or ()))
            raise ApiError(
                403,
                f"model: this API key may not use {shorten(model)}; it may use: {allowed}",
                code="model_not_allowed",
                param="model",
            )

    def check_adapters(self, choice: Any) -> None:
        """Raise ApiError (403) if a body's `adapters` contain a forbidden adapter, even if it isn't loaded.

        Invalid values pass this check, because the job's payload reports its own error for such values.
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
        """Return the first adapter in a body's `adapters` that the caller may not use, or None."""
        if self.adapters is None or choice is None:
            return None
        try:
            chosen = _ADAPTERS.validate_python(choice) or ()
        except ValidationError:
            return None
        return next((name for name, _ in chosen if name not in self.adapters), None)

    @property
    def light_priority(self) -> int:
        """The queue priority of jobs that don't need a slot: the most urgent priority that the caller may use."""
        return TIERS[self.priority or "priority"]

    def tier(self, requested: str | None) -> str:
        """Return a request's service tier. The request may specify a tier, specify "auto", or omit the tier."""
        if requested in (None, "auto"):
            return self.priority or "default"
        most_urgent = self.priority or "priority"
        return max(requested or "", most_urgent, key=lambda tier: TIERS[tier])


class Admission(Protocol):
    """A request that was admitted and charged. `headers` are added to the request's response (`x-ratelimit-…`)."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Charge the caller for the request's jobs and their estimated tokens.

        `num_tokens` estimates the tokens that the jobs prefill and generate. `num_jobs` is the number of prompts times
        the number of choices. Raises ApiError (429).
        """
        ...

    async def end(self, num_tokens: int | None) -> None:
        """Settle the charge once, after all of the request's jobs have finished, failed or been cancelled.

        `num_tokens` is the number of tokens that the jobs used. If `num_tokens` is None, the estimate is charged.
        """
        ...


class Access(Protocol):
    """Authenticates and admits requests, or raises ApiError (401, 403, 429)."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller. The header names in `headers` are in lower case."""
        ...

    async def admit(self, caller: Caller) -> Admission:
        """Charge one request to this caller before the request body is read. Raises ApiError (429)."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True)
class Unlimited:
    """The admission of a request whose caller has no limits."""

    headers: Mapping[str, str] = field(default_factory=dict)

    async def reserve(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Do nothing, because the caller has no limits."""

    async def end(self, num_tokens: int | None) -> None:
        """Do nothing, because the caller has no limits."""


class NoKeys:
    """Accepts every request, and treats all requests as sent by one caller without a tenant.

    Use this class only for a gateway that is on loopback or behind another app.
    """

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        return Caller()

    async def admit(self, caller: Caller) -> Admission:
        return Unlimited()

    async def close(self) -> None:
        """Do nothing."""


_WITHOUT = "without keys only this machine is served, and the request"
CREATE_KEY = "create a key (`cellama keys create TENANT`)"
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # headers of requests that came through a proxy


class LoopbackOnly(NoKeys):
    """Accepts requests that are addressed to this machine by a loopback name and were not forwarded by a proxy.

    The name check keeps out web pages whose domain resolves to 127.0.0.1 (DNS rebinding).
    """

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise ApiError(403, f"{_WITHOUT} was addressed to host {shorten(host)}; use 127.0.0.1, or {CREATE_KEY}")
        if any(name in headers for name in _FORWARDED):
            raise ApiError(403, f"{_WITHOUT} came through a proxy; {CREATE_KEY}")
        return await super().authenticate(headers)


def _name_of(host: str) -> str:
    """Return the host name from a `Host` header without the port, or "" if the header is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether the host is the name or address of a loopback interface."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
