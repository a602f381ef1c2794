"""The endpoints that events go to: what is kept of one, how its calls are signed, and all of them in Redis."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from redis.asyncio import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import webhooks_key

from .announcing import EVENT_TYPES

PREFIX = "whsec_"
SECRET_BYTES = 32  # as long as the digest that it signs
MIN_BYTES, MAX_BYTES = 24, 64  # as the specification has them


def new_secret() -> str:
    """A secret that has never been."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def key_of(secret: str) -> bytes:
    """The bytes of a secret. Raises ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(PREFIX) or not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(f"a secret is {PREFIX} and {MIN_BYTES} to {MAX_BYTES} bytes in base64")
    return key


def signed_headers(secret: str, message_id: str, sent_at: int, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows who sent the body, and when (unix s)."""
    signed = f"{message_id}.{sent_at}.".encode() + body
    digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


MAX_URL_CHARS = 2000  # longer URLs fail in many servers


def check_url(url: str) -> str:
    """Whether it is the URL of an endpoint; where it leads is looked at with each call. Raises ValueError."""
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise ValueError("it must have visible ASCII characters only")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError("it must begin with https:// and have a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it must have no user and password; calls are signed")
    if parts.port == 0:
        raise ValueError("its port must be 1 to 65535")
    return url


def check_events(events: tuple[str, ...]) -> tuple[str, ...]:
    """Raises ValueError."""
    for event in events:
        if event not in EVENT_TYPES:
            raise ValueError(f"{event!r} is not known; there are: {', '.join(EVENT_TYPES)}")
    return events


def check_secret(secret: str) -> str:
    """Raises ValueError."""
    key_of(secret)
    return secret


class Endpoint(BaseModel):
    """`secret` is not shown by `repr`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^we_[0-9a-f]{16}$")]
    tenant: str = ""  # "": of whoever has no key
    url: Annotated[str, Field(max_length=MAX_URL_CHARS), AfterValidator(check_url)]
    events: Annotated[tuple[str, ...], AfterValidator(check_events)] = ()  # empty: all
    secret: Annotated[str, Field(repr=False), AfterValidator(check_secret)]
    created_at: datetime | None = None
    state: Literal["on", "off"] = "on"  # off: it has answered 410

    def wants(self, event_type: str, tenant: str) -> bool:
        """Whether it hears of such an event."""
        return self.state == "on" and self.tenant == tenant and (not self.events or event_type in self.events)


def new_id() -> str:
    """An id that has never been."""
    return f"we_{secrets.token_hex(8)}"


log = logging.getLogger(__name__)

_REPLACE = "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end"


class EndpointStore:
    """Methods raise RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def all(self) -> list[Endpoint]:
        """Every endpoint, the oldest first."""
        values: Any = await self._redis.hgetall(webhooks_key())
        found = [endpoint for value in values.values() if (endpoint := _parsed(value)) is not None]
        return sorted(found, key=_age)

    async def find(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint of that id."""
        value: Any = await self._redis.hget(webhooks_key(), endpoint_id)
        return _parsed(value)

    async def write(self, endpoint: Endpoint) -> None:
        """Redis has it from now on, as it is here."""
        await self._redis.hset(webhooks_key(), endpoint.id, endpoint.model_dump_json(exclude_none=True))

    async def turn_off(self, endpoint: Endpoint) -> None:
        """It hears of nothing more, unless it was deleted meanwhile."""
        value = endpoint.model_copy(update={"state": "off"}).model_dump_json(exclude_none=True)
        await self._redis.eval(_REPLACE, 1, webhooks_key(), endpoint.id, value)

    async def delete(self, endpoint_id: str) -> bool:
        """It hears of nothing more, also not of what waits for it. False if there was none."""
        return bool(await self._redis.hdel(webhooks_key(), endpoint_id))

    async def now(self) -> datetime:
        """By Redis' clock."""
        return datetime.fromtimestamp(int(seconds_of(await self._redis.time())), UTC)


def _age(endpoint: Endpoint) -> tuple[float, str]:
    return (0.0 if endpoint.created_at is None else endpoint.created_at.timestamp(), endpoint.id)


def _parsed(value: bytes | None) -> Endpoint | None:
    """None also for what is no endpoint, or says more than this version knows."""
    if value is None:
        return None
    try:
        return Endpoint.model_validate_json(value)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        log.error("an entry of %s can't be read, so nothing is sent there: wrong are %s", webhooks_key(), places)
        return None
