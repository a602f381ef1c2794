"""A story that is told once, whatever ends in between: this program, the gateway, a worker, Redis.

Start `cellama up --gateway-port 8000`, then this. End whatever you like with `kill -9`, start it again, and this, too:
it goes on where it was. Only what it said in the moment of its own end may come twice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import httpx
from openai import APIError, NotFoundError, OpenAI, omit

STATE = Path(os.environ.get("STORY_STATE", "story.json"))  # the id of the response, and how far it was read
URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
AGAIN_S = 0.5


def begin(client: OpenAI) -> dict[str, int | str]:
    """A background response. With the key, asking again after a lost answer begins no second one."""
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
    """All of it, or what was there before."""
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(STATE)


def read_on(client: OpenAI, state: dict[str, int | str]) -> bool:
    """Says what comes after what was said; true when that was the end."""
    read = int(state["read"])
    after = omit if read < 0 else read
    for event in client.responses.retrieve(str(state["id"]), stream=True, starting_after=after):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        state["read"] = event.sequence_number
        save(state)
        if event.type in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            return True
    return False  # the gateway ended


def main() -> None:
    with OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0) as client:
        while True:
            try:
                state = json.loads(STATE.read_text()) if STATE.exists() else begin(client)
                save(state)
                if read_on(client, state):
                    break
            except NotFoundError as error:
                sys.exit(f"it is not kept any more: {error}")
            except (APIError, httpx.TransportError) as error:  # the latter in mid-stream
                print(f"\n[{error}; asking again]", file=sys.stderr)
            time.sleep(AGAIN_S)
    print()
    STATE.unlink()
    STATE.with_suffix(".key").unlink()


if __name__ == "__main__":
    main()
