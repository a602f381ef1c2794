"""The load of `metrics_proof`: requests of several kinds from several threads, and what their client saw of each."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cellama.api import Client

STREAMED, WHOLE = "streamed", "whole"  # models: of the one the client sees every first token
PATIENCE_S = 300.0
BULK = 9  # a priority
CANCELLED_AFTER = 3  # events of tokens
LATE_S = 20.0  # the timeout of jobs that would take longer; urgent ones have a slot long before
HEADS = [  # of prompts, which are read once
    f"Story {number}. " + "The children went into the wood, and told each other of the river. " * 8
    for number in range(5)
]
KINDS = {"stream": 5, "bulk": 5, "cancelled": 2, "late": 1, "http stream": 4, "http": 3, "embed": 2}  # how often


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request; seconds by its own clock, from before it asked."""

    kind: str
    model: str
    reason: str
    prompt: int
    cached: int
    generated: int
    whole_s: float
    first_s: float | None = None
    num_texts: int = 0  # that were embedded


class Load:
    """Callers who ask again and again."""

    def __init__(self, client: Client, port: int, seed: int) -> None:
        """The port is that of a gateway."""
        self._client = client
        self._port = port
        self._seed = seed
        self._asks: dict[str, Callable[[str, random.Random], Seen]] = {
            "stream": lambda kind, chance: self._stream(kind, chance, max_tokens=chance.randint(4, 60)),
            "bulk": lambda kind, chance: self._stream(kind, chance, max_tokens=chance.randint(20, 120), priority=BULK),
            "cancelled": lambda kind, chance: self._stream(kind, chance, max_tokens=400, ignore_eos=True),
            "late": lambda kind, chance: self._stream(kind, chance, max_tokens=900, ignore_eos=True, timeout=LATE_S),
            "http stream": self._http_stream,
            "http": self._http,
            "embed": self._embed,
        }

    def run(self, num_callers: int, until: float) -> list[Seen]:
        """Until that time of the monotonic clock, and until all that was asked has ended. Raises what failed.

        Before, it asks once each way: imports and first connections of client and gateway are in no stream's time.
        """
        first = [self._asks[kind](kind, random.Random(self._seed)) for kind in ("embed", "http")]
        with ThreadPoolExecutor(num_callers) as pool:
            callers = [pool.submit(self._call, number, until) for number in range(num_callers)]
            return first + [seen for caller in callers for seen in caller.result()]

    def _call(self, number: int, until: float) -> list[Seen]:
        chance, found = random.Random(f"{self._seed} {number}"), []
        while time.monotonic() < until:
            [kind] = chance.choices(list(KINDS), weights=list(KINDS.values()))
            found.append(self._asks[kind](kind, chance))
        return found

    def _prompt(self, chance: random.Random) -> str:
        return chance.choice(HEADS) + f"On day {chance.randrange(1000)}"

    def _stream(self, kind: str, chance: random.Random, **params: Any) -> Seen:
        prompt, first_s, num_events = self._prompt(chance), None, 0
        asked = time.monotonic()
        job = self._client.generate(STREAMED, prompt, **params)
        for event in job.stream(timeout=PATIENCE_S):
            passed_s = time.monotonic() - asked
            if event["type"] == "token":
                first_s, num_events = first_s or passed_s, num_events + 1
                if kind == "cancelled" and num_events == CANCELLED_AFTER:
                    job.cancel()
            elif event["type"] == "done":
                usage = event["usage"]
                if first_s is None:
                    raise RuntimeError(f"job {job.id} ended before its first token: ask with fewer --callers")
                counts = usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"]
                return Seen(kind, STREAMED, event["finish_reason"], *counts, passed_s, first_s)
            elif event["type"] == "error":
                raise RuntimeError(f"job {job.id} failed: {event}")
        raise RuntimeError(f"the stream of job {job.id} has no end")

    def _embed(self, kind: str, chance: random.Random) -> Seen:
        texts = [self._prompt(chance) for _ in range(chance.randint(1, 8))]
        asked = time.monotonic()
        usage = self._client.embed(WHOLE, texts).result(PATIENCE_S)["usage"]
        return Seen(kind, WHOLE, "", usage["prompt_tokens"], 0, 0, time.monotonic() - asked, num_texts=len(texts))

    def _http(self, kind: str, chance: random.Random) -> Seen:
        asked = time.monotonic()
        [told] = self._post({"model": WHOLE, "prompt": self._prompt(chance), "max_tokens": chance.randint(4, 40)})
        return _seen(kind, WHOLE, told["choices"][0]["finish_reason"], told["usage"], time.monotonic() - asked, None)

    def _http_stream(self, kind: str, chance: random.Random) -> Seen:
        body = {"model": STREAMED, "prompt": self._prompt(chance), "max_tokens": chance.randint(4, 60)}
        first_s, reason, usage, asked = None, "", None, time.monotonic()
        for told in self._post({**body, "stream": True, "stream_options": {"include_usage": True}}):
            passed_s = time.monotonic() - asked
            usage = told.get("usage") or usage
            for choice in told["choices"]:
                first_s = first_s or (passed_s if choice["text"] else None)
                reason = choice["finish_reason"] or reason
        return _seen(kind, STREAMED, reason, usage or {}, passed_s, first_s)

    def _post(self, body: dict[str, Any]) -> Iterator[Any]:
        """The answer, or the chunks of the stream as they come. Raises RuntimeError if it is another than 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"the gateway answered {response.status}: {response.read()[:500]!r}")
            if not body.get("stream"):
                yield json.load(response)
                return
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            connection.close()


def _seen(kind: str, model: str, reason: str, usage: dict[str, Any], whole_s: float, first_s: float | None) -> Seen:
    """Of a request over HTTP."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Seen(kind, model, reason, usage["prompt_tokens"], cached, usage["completion_tokens"], whole_s, first_s)
