"""A response's record, which is stored when the response is created and never changes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """The stored record of a response.

    Requests from tenants other than `tenant` get a 404 error. `items` contains the items in the body's `input`.
    `params` contains the job's parameters, except the messages and the model. If there is a `parent_key`, the job
    appends the items to the context with this key. Otherwise, the whole conversation is built from the records of
    `previous` and its predecessors.
    """

    id: str
    tenant: str | None  # None for callers without a key
    job_id: str
    digest: str  # digest of the body, to compare repeated requests with one idempotency key
    created_at: int  # unix s
    model: str  # the model's name in the job
    items: list[dict[str, Any]]
    params: dict[str, Any]
    shown: dict[str, Any]  # the fields that repeat the body
    previous: str | None = None
    parent_key: str | None = None
    background: bool = False
    store: bool = True
    shows_signatures: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of_json(cls, text: str | bytes) -> ResponseRecord:
        """Return the record from JSON written by `to_json`. Fields that newer gateways have added are ignored."""
        fields = json.loads(text)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})
