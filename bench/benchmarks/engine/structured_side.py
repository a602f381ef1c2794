"""One side of `structured`: a version of cellama in a process of its own, which runs the loads that it reads.

Each line of its input is a load as JSON, each line of its output what came of it. It also runs in the environment of an
older version, so it uses only what that has.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import loaded_each, submit_together, warm_up
from cellama.engine import Event, Model, Request, SamplingParams, Text

CONTEXT = 512  # tokens of a slot: room for a prompt and what follows


def main() -> None:
    path, slots, modes, threads = sys.argv[1:]
    options: dict[str, Any] = {"n_parallel": int(slots), "ctx_per_slot": CONTEXT, "cache_ram_bytes": 0}
    options |= {"threads": int(threads)} if int(threads) else {}
    with loaded_each(Path(path), **{mode: {**options, "speculation": mode} for mode in modes.split()}) as models:
        for model in models.values():
            warm_up(model)
        print("ready", flush=True)
        for line in sys.stdin:
            load = json.loads(line)
            print(json.dumps(run(models[load["speculation"]], load)), flush=True)


def run(model: Model, load: dict[str, Any]) -> dict[str, Any]:
    """All requests at once; tokens per second after the last first token."""
    came: list[list[tuple[float, int]]] = [[] for _ in load["requests"]]
    listeners = iter([_listener(entries) for entries in came])
    requests = [
        Request(
            str(number),
            tuple(model.tokenize(request["prompt"], parse_special=True)),
            sampling=SamplingParams(**request["sampling"]),
            max_tokens=load["max_tokens"],
            ignore_eos=True,
            cache_scope=load["scope"],
        )
        for number, request in enumerate(load["requests"])
    ]
    handles = submit_together(model, requests, listeners.__next__)
    done = [handle.result() for handle in handles]
    began, ended = max(entries[0][0] for entries in came), max(entries[-1][0] for entries in came)
    num_tokens = sum(count for entries in came for at, count in entries if at > began)
    return {
        "rate": num_tokens / max(ended - began, 1e-6),
        "tokens": sum(len(completion.tokens) for completion in done),
        "ends": Counter(completion.finish_reason for completion in done),
        "accepted": sum(completion.usage.accepted_prediction_tokens for completion in done),
        "rejected": sum(completion.usage.rejected_prediction_tokens for completion in done),
        "texts": [completion.text for completion in done],
    }


def _listener(entries: list[tuple[float, int]]) -> Callable[[Event], None]:
    """Notes when how many tokens came."""

    def note(event: Event) -> None:
        if isinstance(event, Text) and event.tokens:
            entries.append((time.monotonic(), len(event.tokens)))

    return note


if __name__ == "__main__":
    main()
