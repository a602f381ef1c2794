"""Print a story once, even if this program, the gateway, a worker or Redis stops in the meantime.

Start `cellama up --gateway-port 8000`, then this program. Kill any of the processes with `kill -9`, and restart the
killed processes. This program resumes where it stopped. Only text that was printed just before this program was killed
can appear twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import httpx
from openai import APIError, NotFoundError, OpenAI, omit

# The response's id, and the number of the last event that was read.
STATE = Path(os.environ.get("STORY_STATE", "story.json"))
URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
RETRY_S = 0.5


def start(client: OpenAI) -> dict[str, int | str]:
    """Start a background response. If the call is repeated, the idempotency key prevents a second response."""
    key = STATE.with_suffix(".key")
    if not key.exists():
        key.write_text(os.urandom(16).hex())
    response = client.responses.create(
        model="tiny",
        input="Tell me a story about a fox.",
        background=True,
        max_output_tokens=int(os.environ.get("STORY_TOKENS", "400")),
        temperature=0,
        extra_headers={"Idempotency-Key": key.read_text()},
    )
    return {"id": response.id, "read": -1}


def save(state: dict[str, int | str]) -> None:
    """Replace the state file atomically, so that a crash leaves either the old or the new state."""
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(STATE)


def read_events(client: OpenAI, state: dict[str, int | str]) -> bool:
    """Print the text of all unread events.

    Return True if the response has ended, or False if the gateway has stopped.
    """
    read = int(state["read"])
    after = omit if read < 0 else read
    for event in client.responses.retrieve(str(state["id"]), stream=True, starting_after=after):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        state["read"] = event.sequence_number
        save(state)
        if event.type in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            return True
    return False  # the gateway stopped


def main() -> None:
    with OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0) as client:
        while True:
            try:
                state = json.loads(STATE.read_text()) if STATE.exists() else start(client)
                save(state)
                if read_events(client, state):
                    break
            except NotFoundError as error:
                sys.exit(f"the response has expired: {error}")
            except (APIError, httpx.TransportError) as error:  # TransportError if a stream is interrupted
                print(f"\n[{error}; retrying]", file=sys.stderr)
            time.sleep(RETRY_S)
    print()
    STATE.unlink()
    STATE.with_suffix(".key").unlink()


if __name__ == "__main__":
    main()
