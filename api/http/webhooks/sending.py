"""Make one attempt to deliver a webhook with a POST request to a public address.

Only the status of the response matters.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

import httpx

from cellama.api.http.background import NAMES, in_thread
from cellama.api.webhooks.endpoints import Endpoint, signed_headers

from .ledger import Delivery

Resolver = Callable[[str, int], Awaitable[list[str]]]
_NAT64 = IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address, to which a router forwards packets
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # local to a network (RFC 8215), although Python calls it global
_PORTS = {"https": 443, "http": 80}


class AddressRefused(Exception):
    """The webhook's URL resolves to an address that webhooks may not call."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address that the sender connects to.

    The address is stored so that the host name is not resolved a second time.
    """

    address: str
    host: str
    port: int


async def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses of a host name. Raises OSError."""
    found = await in_thread(NAMES, socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def target_of(url: str, *, private: bool = False, resolve: Resolver = resolve_host) -> Target:
    """Resolve a webhook's URL.

    Raises OSError if the URL's host name has no address. Raises AddressRefused if any of the addresses is not global,
    unless `private` allows it.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not private:
        raise AddressRefused(f"url: {parts.scheme}:// is not allowed; use https://, or set gateway_webhook_private")
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    addresses = await resolve(host, port)
    for address in addresses:
        if not private and not is_global(address):
            raise AddressRefused(
                f"url: {host} has the private address {address}; set gateway_webhook_private to allow it"
            )
    if not addresses:
        raise OSError(f"host {host} has no IP address")
    return Target(addresses[0], host, port)


def is_global(address: str) -> bool:
    """Return whether an address and all IPv4 addresses embedded in it are global."""
    found = ip_address(address.partition("%")[0])
    if found in _LOCAL_NAT64:
        return False
    return all(one.is_global and not one.is_multicast for one in (found, *_wrapped(found)))


def _wrapped(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in inner if one is not None]


MAX_RETRY_AFTER_S = 24 * 3600  # the longest wait that an endpoint can request, as long as the last regular one
GONE = 410  # the endpoint rejects all further events, as Standard Webhooks defines it


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """An attempt's outcome, which is the response's status or the reason why there was no response."""

    status: int | None
    reason: str = ""
    retry_after_s: float = 0.0

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """Whether the endpoint has responded with status 410 (Gone), which rejects all further events."""
        return self.status == GONE


def body_of(delivery: Delivery) -> bytes:
    """Return the request body, which is the same for each attempt."""
    value = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.type,
        "created_at": delivery.created_at,
        "data": {"id": delivery.object_id},
    }
    return json.dumps(value, separators=(",", ":")).encode()


class Sender:
    """Sends webhooks. The sender doesn't follow redirects, use proxies or reuse connections."""

    def __init__(
        self,
        timeout_s: float,
        *,
        private: bool = False,
        resolve: Resolver = resolve_host,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create a sender. `private` allows addresses that only this machine or its network can reach."""
        self._timeout_s = timeout_s
        self._private = private
        self._resolve = resolve
        self._now = now
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),  # a reused one may lead to the address of another name
        )

    async def send(self, delivery: Delivery, endpoint: Endpoint) -> DeliveryOutcome:
        """Make one delivery attempt, which never takes longer than the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(delivery, endpoint)
        except AddressRefused as error:
            return DeliveryOutcome(None, str(error))
        except TimeoutError:
            return DeliveryOutcome(None, f"no answer within {self._timeout_s:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return DeliveryOutcome(None, f"{type(error).__name__}: {error}")

    async def _post(self, delivery: Delivery, endpoint: Endpoint) -> DeliveryOutcome:
        target = await target_of(endpoint.url, private=self._private, resolve=self._resolve)
        url, body = httpx.URL(endpoint.url), body_of(delivery)
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "cellama-webhooks",
            **signed_headers(endpoint.secret, delivery.event_id, int(self._now()), body),
        }
        resolved = url.copy_with(host=target.address)
        extensions = {"sni_hostname": target.host}  # the certificate must be valid for the name
        request = self._client.stream("POST", resolved, content=body, headers=headers, extensions=extensions)
        async with request as answer:
            return DeliveryOutcome(answer.status_code, f"status {answer.status_code}", _retry_after(answer))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _retry_after(answer: httpx.Response) -> float:
    """Return the wait in seconds that the endpoint requests in `Retry-After`, or 0. Dates in the header are ignored."""
    value = answer.headers.get("retry-after", "")
    return float(min(int(value), MAX_RETRY_AFTER_S)) if value.isdecimal() and len(value) < 10 else 0.0
