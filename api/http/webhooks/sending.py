"""One attempt to deliver: one POST, of whose answer the status counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from cellama.api.webhooks.endpoint import Endpoint
from cellama.api.webhooks.signing import signed_headers

from .addresses import AddressRefused, Lookup, lookup, target_of
from .ledger import Delivery

MOST_RETRY_AFTER_S = 24 * 3600
GONE = 410


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """What came of an attempt: the status, or why there is none."""

    status: int | None
    why: str = ""
    retry_after_s: float = 0.0

    @property
    def is_taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """The endpoint wants to hear of nothing more."""
        return self.status == GONE


def body_of(delivery: Delivery) -> bytes:
    """What is said; the same in each attempt."""
    told = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.type,
        "created_at": delivery.created_at,
        "data": {"id": delivery.object_id},
    }
    return json.dumps(told, separators=(",", ":")).encode()


class Sender:
    """Sends with one client, which follows no redirects, asks no proxy and keeps no connection."""

    def __init__(
        self, timeout_s: float, *, private: bool = False, look: Lookup = lookup, now: Callable[[], float] = time.time
    ) -> None:
        """`private`: whether it may go to addresses that only this machine or its network reaches."""
        self._timeout_s = timeout_s
        self._private = private
        self._look = look
        self._now = now
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),  # one that is kept may lead to another name's address
        )

    async def send(self, delivery: Delivery, endpoint: Endpoint) -> DeliveryOutcome:
        """Never takes longer than the timeout, whatever the other side does."""
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
        target = await target_of(endpoint.url, private=self._private, look=self._look)
        url, body = httpx.URL(endpoint.url), body_of(delivery)
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "cellama-webhooks",
            **signed_headers(endpoint.secret, delivery.event_id, int(self._now()), body),
        }
        there = url.copy_with(host=target.address)
        extensions = {"sni_hostname": target.host}  # the certificate must be that of the name, not of the address
        async with self._client.stream("POST", there, content=body, headers=headers, extensions=extensions) as answer:
            return DeliveryOutcome(answer.status_code, f"status {answer.status_code}", _retry_after(answer))

    async def close(self) -> None:
        """Gives connections up."""
        await self._client.aclose()


def _retry_after(answer: httpx.Response) -> float:
    """In seconds; dates are not read."""
    told = answer.headers.get("retry-after", "")
    return float(min(int(told), MOST_RETRY_AFTER_S)) if told.isdecimal() and len(told) < 10 else 0.0
