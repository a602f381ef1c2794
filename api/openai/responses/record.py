"""What is known of a response from its creation on. It never changes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response belongs to `tenant`: other tenants get 404 for its id.

    `items` are those of the body's `input`, `params` those of the job except for messages and model.

    The job was asked what the items say after `parent_key`; without that, after the conversation before them, which the
    records of `previous`, and of those before it, have.
    """

    id: str
    tenant: str | None  # None: callers without a key
    job_id: str
    digest: str  # of the body: what an idempotency key stands for
    created_at: int  # unix s
    model: str  # as the job names it
    items: list[dict[str, Any]]
    params: dict[str, Any]
    shown: dict[str, Any]  # what the object repeats of the body
    previous: str | None = None
    parent_key: str | None = None
    background: bool = False
    store: bool = True
    shows_signatures: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of_json(cls, text: str | bytes) -> ResponseRecord:
        """Return what `to_json` wrote. Fields that a newer gateway wrote are left out."""
        fields = json.loads(text)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})
