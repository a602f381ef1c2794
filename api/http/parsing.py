"""Parse requests: authenticate callers, read JSON bodies within their limits, and parse common parameters."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from cellama.config import limits
from cellama.tasks.contract.fairness import fairness_key_below, fairness_key_of
from cellama.tasks.contract.json_values import shorten, valid_text
from cellama.tasks.contract.names import DEFAULT_MODEL, SCOPE_SEPARATOR
from cellama.tasks.contract.shapes.workers import ModelView

from .auth import TIERS, Caller
from .background import BODIES, in_thread
from .context import RequestContext, charged, context_of
from .errors import ApiError
from .gateway import Gateway

P = ParamSpec("P")
T = TypeVar("T")

BODY_TYPE = "application/json"  # browsers ask for permission before a page sends this type to another site
MAX_KEY_CHARS = 256  # length of an idempotency key: more than any known client sends
MAX_LENGTH_DIGITS = 15  # digits of a size in bytes: a petabyte exceeds every limit
LARGE_BYTES = 64 << 10  # larger bodies are parsed in a thread, smaller ones take a millisecond or two
MAX_VALUES = 1 << 18  # in a body: parsing JSON blocks all other threads, for about 20 ms with this many values
VALUE_BYTES = 64  # estimated memory of a small value beyond its text
CHARS_PER_TOKEN = 4  # estimate for English
MIN_TOKENS = 16  # tokens of an answer if the context length of the model is unknown
LIMIT_DIVISOR = 4  # a request without max_tokens may use a quarter of its caller's limit, so four of them can run
# Arguments of the client's methods that are not valid in a body. A caller must not choose its own tenant.
CLIENT_ARGUMENTS = ("self", "wait", "idempotency_key", "fairness_key")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request with its authenticated caller and its body."""

    request: Request
    context: RequestContext
    caller: Caller
    body: dict[str, Any]
    num_bytes: int = 0

    @property
    def gateway(self) -> Gateway:
        return self.context.gateway

    async def read_by(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a function that processes the body.

        A large body is processed in a thread, so the event loop is not blocked.
        """
        if self.num_bytes <= LARGE_BYTES:
            return function(*args, **options)
        return await in_thread(BODIES, function, *args, **options)

    @property
    def idempotency_key(self) -> str | None:
        """The client's idempotency key, combined with the client's tenant. Raises ApiError."""
        key = self.request.headers.get("idempotency-key")
        if key is None:
            return None
        if not 1 <= len(key) <= MAX_KEY_CHARS:
            raise ApiError(
                400,
                f"Idempotency-Key has {len(key)} characters; it must have 1 to {MAX_KEY_CHARS}",
                param="Idempotency-Key",
            )
        return json.dumps([self.caller.tenant, key])

    def tier(self) -> str:
        """Return the request's service tier. Raises ApiError."""
        requested = self.body.get("service_tier")
        if requested is not None and requested not in ("auto", *TIERS):
            known = ", ".join(("auto", *TIERS))
            raise ApiError(
                400, f"service_tier is {shorten(requested)}; it must be one of {known}", param="service_tier"
            )
        return self.caller.tier(requested)

    def scope(self) -> str:
        """Return the scope in which prefixes are shared: the tenant, combined with `cache_salt` if it is given.

        Raises ApiError.
        """
        salt, tenant = self.body.get("cache_salt"), self.caller.tenant or ""
        if salt is None:
            return tenant
        max_chars = limits.MAX_NAME_CHARS // 2
        if not isinstance(salt, str) or not 1 <= len(salt) <= max_chars or "\0" in salt or valid_text(salt) != salt:
            raise ApiError(400, f"cache_salt must be a string of 1 to {max_chars} characters", param="cache_salt")
        return f"{tenant}{SCOPE_SEPARATOR}{salt}"

    def params_of_caller(self) -> dict[str, Any]:
        """Return the job parameters that depend on the caller, which are the priority, the scope and the tenant.

        The client's methods accept these parameters as arguments. Raises ApiError.
        """
        scope = self.scope()
        return {"priority": TIERS[self.tier()], "fairness_key": self.fairness_key()} | (
            {"cache_scope": scope} if scope else {}
        )

    @property
    def light_options(self) -> dict[str, Any]:
        """The client method's arguments for a job that doesn't need a slot.

        These arguments give the job a high priority.
        """
        return {"wait": True, "priority": self.caller.light_priority, "fairness_key": self.fairness_key()}

    def fairness_key(self) -> str | None:
        """Return the fairness key of the tenant or of one of its users, or None if the caller has no tenant."""
        if self.caller.tenant is None:
            return None
        key = fairness_key_of(self.caller.tenant)
        return fairness_key_below(key, user) if (user := self._user()) else key

    def _user(self) -> str | None:
        """Return the user specified in the body, if users have their own shares.

        Values that are not strings are ignored.
        """
        if not self.gateway.settings.gateway_user_shares:
            return None
        metadata = self.body.get("metadata")
        named = metadata.get("user_id") if isinstance(metadata, Mapping) else None
        users = (self.body.get("user"), self.body.get("safety_identifier"), named)
        return next((user for user in users if isinstance(user, str) and user), None)

    def name_of(self, model: ModelView) -> str:
        """Return the model name for the job.

        The name is "default" if the body specifies the default model or no model. The default model is then chosen when
        the job runs.
        """
        name = self.body.get("model") or DEFAULT_MODEL
        name = self.gateway.settings.model_aliases.get(name, name)
        return DEFAULT_MODEL if name == DEFAULT_MODEL else model["id"]


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The requested page of a list, with up to `limit` objects after the object with the id `after`.

    `order` is "desc" if the newest objects come first, and "asc" if the oldest objects come first.
    """

    after: str | None
    limit: int
    order: str

    @classmethod
    def of(cls, query: Mapping[str, str], default_limit: int, max_limit: int) -> PageQuery:
        """Parse a URL's query. Raises ApiError."""
        limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= max_limit):
            raise ApiError(400, f"limit is {limit[:40]!r}; it must be a number from 1 to {max_limit}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:40]!r}; it must be asc or desc", param="order")
        return cls(query.get("after") or None, int(limit), order)

    def to_list(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the response for the page.

        `found` starts with the page's objects, and contains at least one more object if there is a next page.
        """
        data = list(found[: self.limit])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        has_more = len(found) > self.limit
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def check_known(values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ApiError if the object has a member with an unknown name."""
    for name in values:
        if name not in known:
            raise ApiError(400, f"unknown parameter {shorten(name)}; known parameters: {', '.join(known)}", param=name)


def declared_bytes(request: Request) -> int:
    """Return the Content-Length of the request, or 0 if the header is missing."""
    given = request.headers.get("content-length", "")
    return int(given[:MAX_LENGTH_DIGITS]) if given.isascii() and given.isdecimal() else 0


def check_not_encoded(request: Request) -> None:
    """Raise ApiError (415) if the body is compressed."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"content-encoding is {shorten(encoding)}; send the body without compression")


def flag(values: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the value of an optional boolean member. Raises ApiError if the value is neither true nor false."""
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {shorten(value)}; it must be true or false", param=name)
    return value


async def read(request: Request, body_types: Collection[str] = (BODY_TYPE,)) -> ParsedRequest:
    """Authenticate and charge the request, and then parse its body. An invalid body therefore also counts as a request.

    The content type of the request must be one of `body_types`. Raises ApiError, and ClientDisconnect if the client
    disconnects.
    """
    return await read_of(request, await charged(request), body_types)


async def read_of(request: Request, caller: Caller, body_types: Collection[str] = (BODY_TYPE,)) -> ParsedRequest:
    """Parse the body of a request that has been charged to this caller. Raises ApiError or ClientDisconnect."""
    context = context_of(request)
    _check_type(request, body_types)
    parts = await _parts(request, context.gateway.settings.gateway_max_body_bytes, caller, context)
    num_bytes = sum(map(len, parts))
    if num_bytes <= LARGE_BYTES:
        body, num_values = _object(parts)
    else:
        body, num_values = await in_thread(BODIES, _object, parts)
    context.hold(caller, num_values * VALUE_BYTES)
    caller.check_adapters(body.get("adapters"))
    return ParsedRequest(request=request, context=context, caller=caller, body=body, num_bytes=num_bytes)


def _check_type(request: Request, body_types: Collection[str]) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in body_types:
        raise ApiError(415, f"content-type is {shorten(kind)}; send application/json")


async def _parts(request: Request, limit: int, caller: Caller, context: RequestContext) -> list[bytes]:
    check_not_encoded(request)
    size, parts = declared_bytes(request), []
    if size <= limit:
        size = 0
        async for part in request.stream():
            context.hold(caller, len(part))
            size += len(part)
            parts.append(part)
            if size > limit:
                break
    if size > limit:
        raise ApiError(
            413,
            f"the body has more than {limit} bytes, the maximum; send a smaller body, or raise gateway_max_body_bytes",
        )
    return parts


def _object(parts: list[bytes]) -> tuple[dict[str, Any], int]:
    """Parse the body as an object. Return the object and its approximate number of values. Raises ApiError."""
    raw = b"".join(parts)
    num_values = count_values(raw, MAX_VALUES)
    if num_values > MAX_VALUES:
        raise ApiError(
            400,
            f"the body has more than {MAX_VALUES} values; send a prompt as text instead of token ids, or send several "
            "requests",
        )
    try:
        text = raw.removeprefix(BOM_UTF8).decode()
        value = json.loads(text) if len(raw) <= LARGE_BYTES else from_json(text)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}; encode it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}, not an object")
    for name in CLIENT_ARGUMENTS:
        if name in value:
            raise ApiError(400, f"unknown parameter {name!r}; leave it out", param=name)
    return value, num_values


_OUTSIDE_TEXTS = re.compile(rb'[",\[{]')
_IN_A_TEXT = re.compile(rb'(?:[^"\\]|\\.){0,65536}+', re.DOTALL)  # in chunks, so that other threads can run


def count_values(raw: bytes, limit: int) -> int:
    """Return the number of values in a JSON document, or an upper bound if the bound does not exceed the limit.

    Counting stops as soon as the limit is exceeded. Strings are skipped only if their commas and brackets could affect
    the result.
    """
    num_marks = sum(map(raw.count, (b",", b"[", b"{")))
    if num_marks < limit:
        return num_marks + 1
    num_values, at = 1, 0
    while num_values <= limit and (found := _OUTSIDE_TEXTS.search(raw, at)) is not None:
        at = found.end()
        if found[0] != b'"':
            num_values += 1
            continue
        while (piece := _IN_A_TEXT.match(raw, at)) is not None and piece.end() > at:
            at = piece.end()
        at += 1  # its closing quote
    return num_values


# Estimates of the tokens that a request may use, before its jobs run


def tokens_of(*contents: Any) -> int:
    """Estimate the number of tokens. Token ids, recognized by the first entry of a list, are counted exactly."""
    num_chars, remaining = 0, list(contents)
    while remaining:
        content = remaining.pop()
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, Mapping):
            num_chars += CHARS_PER_TOKEN * len(content) + sum(map(len, map(str, content)))
            remaining.extend(content.values())
        elif not isinstance(content, list | tuple):
            num_chars += CHARS_PER_TOKEN
        elif content and isinstance(content[0], int):
            num_chars += CHARS_PER_TOKEN * len(content)
        else:
            num_chars += CHARS_PER_TOKEN * len(content)
            remaining.extend(content)
    return num_chars // CHARS_PER_TOKEN


def count(value: Any, default: int) -> int:
    """Return a positive number from the body, or the default. The job's payload rejects invalid values later."""
    return value if type(value) is int and value > 0 else default


def rest_of_context(model: ModelView, params: Mapping[str, Any]) -> int:
    """Return the default for max_tokens, which is the context length.

    If the request asks for logprobs, the default may be lower because the number of reported logprobs is limited.
    """
    per_token = count(params.get("n"), 1) * (count(params.get("logprobs"), 0) + 1)
    max_tokens = limits.MAX_REPORTED // per_token if "logprobs" in params else limits.MAX_COUNT
    return max(1, min(model.get("ctx_per_slot") or MIN_TOKENS, max_tokens))


def within_limit(limit: int | None, max_tokens: int, num_answers: int = 1) -> int:
    """Return the default for max_tokens if the caller has a limit.

    The request's answers combined may use up to a quarter of the limit, so that one request does not exhaust it.
    """
    if limit is None:
        return max_tokens
    return max(1, min(max_tokens, limit // LIMIT_DIVISOR // num_answers))
