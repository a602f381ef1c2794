"""Define webhook endpoints, sign requests to them, and store them in Redis."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from redis.asyncio import Redis

from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import seconds_of
from cellama.tasks.contract.keys import webhooks_key

from .announcing import EVENT_TYPES

PREFIX = "whsec_"
SECRET_BYTES = 32  # as long as the digest that it signs
MIN_BYTES, MAX_BYTES = 24, 64  # the limits of Standard Webhooks


def new_secret() -> str:
    """Return a new random secret."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def key_of(secret: str) -> bytes:
    """Return a secret's bytes. Raises ValueError if the secret is invalid."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(PREFIX) or not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(f"the secret must be {PREFIX} followed by {MIN_BYTES} to {MAX_BYTES} base64-encoded bytes")
    return key


def signed_headers(secret: str, message_id: str, sent_at: int, body: bytes) -> dict[str, str]:
    """Return the headers that a receiver needs to verify the body's sender and time. `sent_at` is in Unix seconds."""
    signed = f"{message_id}.{sent_at}.".encode() + body
    digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }


MAX_URL_CHARS = 2000  # longer URLs fail in many servers


def check_url(url: str) -> str:
    """Return the URL if it is valid. The address is checked before each request. Raises ValueError."""
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise ValueError("the URL must consist of visible ASCII characters")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError("the URL must start with https:// and have a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL must not contain a user or password, because cellama signs its requests instead")
    if parts.port == 0:
        raise ValueError("the URL's port must be from 1 to 65535")
    return url


def check_events(events: tuple[str, ...]) -> tuple[str, ...]:
    """Return the event types if all of them are known. Raises ValueError if a type is unknown."""
    for event in events:
        if event not in EVENT_TYPES:
            raise ValueError(f"event type {event!r} is unknown; use one of: {', '.join(EVENT_TYPES)}")
    return events


def check_secret(secret: str) -> str:
    """Return the secret if it is valid. Raises ValueError if the secret is invalid."""
    key_of(secret)
    return secret


class Endpoint(BaseModel):
    """A registered endpoint. The object's `repr` does not show the `secret`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^we_[0-9a-f]{16}$")]
    tenant: str = ""  # "" stands for callers without a key
    url: Annotated[str, Field(max_length=MAX_URL_CHARS), AfterValidator(check_url)]
    events: Annotated[tuple[str, ...], AfterValidator(check_events)] = ()  # empty: all
    secret: Annotated[str, Field(repr=False), AfterValidator(check_secret)]
    created_at: datetime | None = None
    state: Literal["on", "off"] = "on"  # "off" after the endpoint has answered 410

    def subscribes_to(self, event_type: str, tenant: str) -> bool:
        """Return whether the endpoint receives events of this type for this tenant."""
        return self.state == "on" and self.tenant == tenant and (not self.events or event_type in self.events)


def new_id() -> str:
    """Return a new random id."""
    return f"we_{secrets.token_hex(8)}"


log = event_logger(__name__)

_REPLACE = "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end"


class EndpointStore:
    """Stores all registered endpoints. All methods may raise RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def all(self) -> list[Endpoint]:
        """Return all endpoints, oldest first."""
        values: Any = await self._redis.hgetall(webhooks_key())
        found = [endpoint for value in values.values() if (endpoint := _parsed(value)) is not None]
        return sorted(found, key=_age)

    async def find(self, endpoint_id: str) -> Endpoint | None:
        """Return the endpoint with this id, or None."""
        value: Any = await self._redis.hget(webhooks_key(), endpoint_id)
        return _parsed(value)

    async def write(self, endpoint: Endpoint) -> None:
        """Store an endpoint, replacing its previous version."""
        await self._redis.hset(webhooks_key(), endpoint.id, endpoint.model_dump_json(exclude_none=True))

    async def disable(self, endpoint: Endpoint) -> None:
        """Disable an endpoint, unless it has been deleted."""
        value = endpoint.model_copy(update={"state": "off"}).model_dump_json(exclude_none=True)
        await self._redis.eval(_REPLACE, 1, webhooks_key(), endpoint.id, value)

    async def delete(self, endpoint_id: str) -> bool:
        """Delete an endpoint and drop its pending deliveries. Return False if the endpoint did not exist."""
        return bool(await self._redis.hdel(webhooks_key(), endpoint_id))

    async def now(self) -> datetime:
        """Return the Redis server's current time."""
        return datetime.fromtimestamp(int(seconds_of(await self._redis.time())), UTC)


def _age(endpoint: Endpoint) -> tuple[float, str]:
    return (0.0 if endpoint.created_at is None else endpoint.created_at.timestamp(), endpoint.id)


def _parsed(value: bytes | None) -> Endpoint | None:
    """Return the endpoint, or None if its entry is missing, invalid or from a newer version."""
    if value is None:
        return None
    try:
        return Endpoint.model_validate_json(value)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        log.error(
            "webhook endpoint ignored",
            key=webhooks_key(),
            detail=f"invalid fields: {fields}; the endpoint receives no events",
        )
        return None
