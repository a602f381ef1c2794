"""Create and revoke API keys, for the command line and the console."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from cellama.config.settings import explain

from .entry import KeyEntry, KeyText, new_key, parse_key
from .store import KeyLookup, KeyStore

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class InvalidKeyField(ValueError):
    """A field of a new key is invalid. The message contains the field's name and its valid values."""


async def create_key(
    store: KeyStore, fields: Mapping[str, Any], lifetime_s: float | None, *, is_stored: bool
) -> tuple[KeyText, KeyEntry]:
    """Return a new key and its entry. Without `is_stored`, the caller must add the entry to the keys file.

    A key without `lifetime_s` never expires. Raises InvalidKeyField.
    """
    key, now = new_key(), await store.now()
    expires_at = None if lifetime_s is None else now + timedelta(seconds=lifetime_s)
    try:
        entry = KeyEntry.model_validate(
            {**fields, "id": key.id, "digest": key.digest, "created_at": now, "expires_at": expires_at}
        )
    except ValidationError as error:
        raise InvalidKeyField("; ".join(map(explain, error.errors()))) from None
    if is_stored:
        await store.write(entry)
    return key, entry


async def revoke_key(store: KeyStore, key_id: str) -> KeyLookup:
    """Revoke a key, given by its id or by the key itself, and return the result.

    If the key is unknown, the result contains no entry.
    """
    key = parse_key(key_id)
    key_id = key_id if key is None else key.id
    found = await store.look_up(key_id)
    if found.entry is None:
        return found
    if found.entry.revoked_at is None:
        await store.write(found.entry.model_copy(update={"revoked_at": await store.now()}))
    return await store.look_up(key_id)


def seconds_of(lifetime: str) -> float:
    """Return the number of seconds in a lifetime such as 30m, 12h, 90d or 4w. Raises InvalidKeyField."""
    found = re.fullmatch(r"([1-9]\d{0,3})([mhdw])", lifetime, re.ASCII)
    if found is None:
        raise InvalidKeyField(f"invalid duration {lifetime[:40]!r}; use, for example, 30m, 12h, 90d or 4w")
    return timedelta(**{_UNITS[found[2]]: int(found[1])}).total_seconds()


def as_toml(entry: KeyEntry) -> str:
    """Return a key's entry in the format of a keys file."""
    lines = ["[[keys]]"]
    for name, value in entry.model_dump(exclude_none=True).items():
        if isinstance(value, datetime):
            lines.append(f"{name} = {value.isoformat()}")
        elif value != "":
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
