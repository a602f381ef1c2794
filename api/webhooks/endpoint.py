"""What is kept of an endpoint: where a tenant's events go."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .announcing import EVENT_TYPES
from .signing import key_of

MAX_URL_CHARS = 2000


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
