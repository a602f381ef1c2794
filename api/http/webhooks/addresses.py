"""Where a call may go: to a public address. What only the gateway reaches is no endpoint, whatever its
name says."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from cellama.api.http.background import NAMES, in_thread

Lookup = Callable[[str, int], Awaitable[list[str]]]
_NAT64 = IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address, which a router there goes on to
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")  # of a network's own (RFC 8215), which Python calls global
_PORTS = {"https": 443, "http": 80}


class AddressRefused(Exception):
    """The URL leads where no webhook may go."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a call goes: to `address` alone, whatever the name means by then."""

    address: str
    host: str
    port: int


async def lookup(host: str, port: int) -> list[str]:
    """All addresses of a name. Raises OSError."""
    found = await in_thread(NAMES, socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def target_of(url: str, *, private: bool = False, look: Lookup = lookup) -> Target:
    """Return where the URL leads now. Raises OSError if its name has no address, and AddressRefused unless every one
    is global or `private` ones may be called."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not private:
        raise AddressRefused(f"the URL begins with {parts.scheme}://; use https://, or set gateway_webhook_private")
    host = parts.hostname or ""
    port = parts.port or _PORTS[parts.scheme]
    addresses = await look(host, port)
    for address in addresses:
        if not private and not is_global(address):
            raise AddressRefused(
                f"{host} is {address}, which is not reached from everywhere; see gateway_webhook_private"
            )
    if not addresses:
        raise OSError(f"{host} has no address")
    return Target(addresses[0], host, port)


def is_global(address: str) -> bool:
    """Whether an address, and each that is wrapped in it, is reached from everywhere."""
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
