"""What comes in: a body that is read, bounded and made into an object, and whoever sent it; which page of a list."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from cellama.config import limits
from cellama.tasks.contract.json_values import shorten, valid_text
from cellama.tasks.contract.names import DEFAULT_MODEL
from cellama.tasks.contract.shapes.workers import ModelView

from .auth import TIERS, Caller
from .background import BODIES, in_thread
from .context import RequestContext, charged, context_of
from .errors import ApiError
from .gateway import Gateway

P = ParamSpec("P")
T = TypeVar("T")

BODY_TYPE = "application/json"  # a page in a browser can't send this to another site unasked, but it can send none
MAX_KEY_CHARS = 256  # of an idempotency key: more than any known client sends
MAX_LENGTH_DIGITS = 15  # of a size in bytes: a petabyte is beyond every limit
LARGE_BYTES = 64 << 10  # a body above this is read in a thread: smaller ones take a millisecond or two
MAX_VALUES = 1 << 18  # of a body: parsing JSON holds up all other threads, and so many values take some 20 ms
VALUE_BYTES = 64  # about: memory of a small value beyond its text
CHARS_PER_TOKEN = 4  # about, in English
LEAST_TOKENS = 16  # of an answer, where a model says nothing of its context
PARTS_OF_LIMIT = 4  # a request that names no length may take a quarter of its caller's limit: four of them can run
OF_CALLS = ("self", "wait", "idempotency_key")  # arguments of the client's methods, and no endpoint's parameters


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request whose caller is known, with the object that is its body."""

    request: Request
    context: RequestContext
    caller: Caller
    body: dict[str, Any]
    num_bytes: int = 0

    @property
    def gateway(self) -> Gateway:
        return self.context.gateway

    async def read_by(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a function that reads the body: in a thread if it is large, so that others are served meanwhile."""
        if self.num_bytes <= LARGE_BYTES:
            return function(*args, **options)
        return await in_thread(BODIES, function, *args, **options)

    @property
    def idempotency_key(self) -> str | None:
        """The client's, within its tenant. Raises ApiError."""
        key = self.request.headers.get("idempotency-key")
        if key is None:
            return None
        if not 1 <= len(key) <= MAX_KEY_CHARS:
            raise ApiError(
                400,
                f"Idempotency-Key has {len(key)} characters; it may have 1 to {MAX_KEY_CHARS}",
                param="Idempotency-Key",
            )
        return json.dumps([self.caller.tenant, key])

    def tier(self) -> str:
        """The service tier that the request gets. Raises ApiError."""
        wanted = self.body.get("service_tier")
        if wanted is not None and wanted not in ("auto", *TIERS):
            known = ", ".join(("auto", *TIERS))
            raise ApiError(400, f"service_tier is {shorten(wanted)}; known: {known}", param="service_tier")
        return self.caller.tier(wanted)

    def scope(self) -> str:
        """Within which prefixes are shared: the tenant, divided by `cache_salt` if that is given. Raises ApiError."""
        salt, tenant = self.body.get("cache_salt"), self.caller.tenant or ""
        if salt is None:
            return tenant
        most = limits.MAX_NAME_CHARS // 2
        if not isinstance(salt, str) or not 1 <= len(salt) <= most or "\0" in salt or valid_text(salt) != salt:
            raise ApiError(400, f"cache_salt must be a text of 1 to {most} characters", param="cache_salt")
        return f"{tenant}\x1f{salt}"

    def params_of_caller(self) -> dict[str, Any]:
        """Parameters of a job that no body gives by these names: they say whose it is, and how urgent. Raises
        ApiError."""
        scope = self.scope()
        return {"priority": TIERS[self.tier()]} | ({"cache_scope": scope} if scope else {})

    def name_of(self, model: ModelView) -> str:
        """As a job names the model that the body has: the default one is that of when it runs. Where an endpoint needs
        no name it is the default one, too."""
        named = self.body.get("model") or DEFAULT_MODEL
        return DEFAULT_MODEL if named == DEFAULT_MODEL else model["id"]


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list, as OpenAI's clients ask for it: after the thing of this id, the last one first ("desc") or
    last ("asc")."""

    after: str | None
    limit: int
    order: str

    @classmethod
    def of(cls, query: Mapping[str, str], usual: int, most: int) -> PageQuery:
        """Raises ApiError."""
        limit, order = query.get("limit", str(usual)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
            raise ApiError(400, f"limit is {limit[:40]!r}; it must be a number from 1 to {most}", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:40]!r}; it must be asc or desc", param="order")
        return cls(query.get("after") or None, int(limit), order)

    def shown(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The answer. `found` begins where the page does; what is beyond the limit says only that there is more."""
        data = list(found[: self.limit])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        has_more = len(found) > self.limit
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def check_known(values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ApiError for a member of another name."""
    for name in values:
        if name not in known:
            raise ApiError(400, f"unknown parameter {shorten(name)}; known: {', '.join(known)}", param=name)


def declared_bytes(request: Request) -> int:
    """Return the size of the body as the head of the request has it; 0 if it has none."""
    given = request.headers.get("content-length", "")
    return int(given[:MAX_LENGTH_DIGITS]) if given.isascii() and given.isdecimal() else 0


def check_not_encoded(request: Request) -> None:
    """Raises ApiError (415) for a body that is compressed."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"content-encoding is {shorten(encoding)}; send the body as it is")


def flag(values: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A member that is true or false, or not there. Raises ApiError."""
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {shorten(value)}; it must be true or false", param=name)
    return value


async def read(request: Request) -> ParsedRequest:
    """The caller first, then the body. The request is charged in between, so whatever is wrong with the body costs a
    request. Raises ApiError, and ClientDisconnect if the client is gone by then."""
    context = context_of(request)
    caller = await charged(request)
    parts = await _parts(request, context.gateway.settings.gateway_max_body_bytes, caller, context)
    num_bytes = sum(map(len, parts))
    if num_bytes <= LARGE_BYTES:
        body, num_values = _object(parts)
    else:
        body, num_values = await in_thread(BODIES, _object, parts)
    context.hold(caller, num_values * VALUE_BYTES)
    caller.check_adapters(body.get("adapters"))
    return ParsedRequest(request=request, context=context, caller=caller, body=body, num_bytes=num_bytes)


async def _parts(request: Request, limit: int, caller: Caller, context: RequestContext) -> list[bytes]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != BODY_TYPE:
        raise ApiError(415, f"content-type is {shorten(kind)}; send application/json")
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
            413, f"the body has more than {limit} bytes, which is the limit: send less, or raise gateway_max_body_bytes"
        )
    return parts


def _object(parts: list[bytes]) -> tuple[dict[str, Any], int]:
    """The object of a body, and about how many values it has. Raises ApiError."""
    raw = b"".join(parts)
    num_values = count_values(raw, MAX_VALUES)
    if num_values > MAX_VALUES:
        raise ApiError(
            400,
            f"the body has more than {MAX_VALUES} values; send a prompt as text instead of token ids, or send several "
            "requests",
        )
    try:
        text = raw.decode()
        value = json.loads(text) if len(raw) <= LARGE_BYTES else from_json(text)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type(value).__name__}, not an object")
    for name in OF_CALLS:
        if name in value:
            raise ApiError(400, f"unknown parameter {name!r}; leave it out", param=name)
    return value, num_values


_OUTSIDE_TEXTS = re.compile(rb'[",\[{]')
_IN_A_TEXT = re.compile(rb'(?:[^"\\]|\\.){0,65536}+', re.DOTALL)  # in pieces, so that other threads get their turns


def count_values(raw: bytes, limit: int) -> int:
    """Return at least how many values a JSON text has, up to one more than the limit. Texts are skipped only if it
    matters: their commas and brackets count unless they would exceed the limit."""
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


# How many tokens a request may take, as far as that is known before its jobs run


def tokens_of(*contents: Any) -> int:
    """About. Token ids count as themselves: the first entry of a list says whether the list has them."""
    num_chars, left = 0, list(contents)
    while left:
        content = left.pop()
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, Mapping):
            num_chars += CHARS_PER_TOKEN * len(content) + sum(map(len, map(str, content)))
            left.extend(content.values())
        elif not isinstance(content, list | tuple):
            num_chars += CHARS_PER_TOKEN
        elif content and isinstance(content[0], int):
            num_chars += CHARS_PER_TOKEN * len(content)
        else:
            num_chars += CHARS_PER_TOKEN * len(content)
            left.extend(content)
    return num_chars // CHARS_PER_TOKEN


def count(value: Any, default: int) -> int:
    """A number of the body, which the job's payload may refuse later."""
    return value if type(value) is int and value > 0 else default


def rest_of_context(model: ModelView, params: Mapping[str, Any]) -> int:
    """What an answer may have that does not say how much: the context, or as many tokens as logprobs allow."""
    per_token = count(params.get("n"), 1) * (count(params.get("logprobs"), 0) + 1)
    most = limits.MAX_REPORTED // per_token if "logprobs" in params else limits.MAX_COUNT
    return max(1, min(model.get("ctx_per_slot") or LEAST_TOKENS, most))


def within_limit(limit: int | None, most: int, num_answers: int = 1) -> int:
    """Tokens of each answer where the request says nothing: all together at most a part of the caller's limit, so that
    one request does not take it alone."""
    if limit is None:
        return most
    return max(1, min(most, limit // PARTS_OF_LIMIT // num_answers))
