"""Test which addresses webhooks may call."""

from __future__ import annotations

import asyncio

import pytest

from cellama.api.http.webhooks.sending import AddressRefused, Target, is_global, target_of


def target(url: str, *addresses: str, private: bool = False) -> Target:
    async def look(host: str, port: int) -> list[str]:
        return list(addresses)

    return asyncio.run(target_of(url, private=private, resolve=look))


NOT_GLOBAL = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 ::1 :: fe80::1%eth0 "
    "fd00::1 ::ffff:127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1 64:ff9b:1::1 ff02::1"
)


@pytest.mark.parametrize("address", NOT_GLOBAL.split())
def test_target_rejects_non_global_addresses(address: str) -> None:
    assert not is_global(address)
    with pytest.raises(AddressRefused, match="gateway_webhook_private"):
        target("https://example.org/h", "8.8.8.8", address)
    assert target("http://example.org/h", address, private=True) == Target(address, "example.org", 80)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_target_accepts_global_addresses(address: str) -> None:
    assert target("https://example.org:8443/h", address) == Target(address, "example.org", 8443)


def test_target_rejects_plain_http() -> None:
    with pytest.raises(AddressRefused, match="https://"):
        target("http://example.org", "8.8.8.8")


def test_target_raises_oserror_for_host_name_without_address() -> None:
    with pytest.raises(OSError, match="no IP address"):
        target("https://example.org")
