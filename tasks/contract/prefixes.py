"""Hash increasingly long prefixes of a job's prompt, so workers can prefer jobs whose prefixes they have cached.

The producer has no tokenizer, so it hashes the text or the messages (docs/affinity.md). If two jobs have the same hash,
their texts are identical up to the end of the prefix, and their queue, scope, adapters and tools are the same. If
hashes collide, or a prefix is no longer in the cache, a worker only has to compute more tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .all_kinds import KINDS

MIN_BYTES = (
    512  # the shortest prefix with a hash, about 128 tokens; computing fewer takes less time than a choice saves
)
GROWTH = 1.5  # each position is this many times the previous one, so at least two thirds of a shared prefix are found
MAX_POSITIONS = 16  # up to 220 KB
MAX_MESSAGES = 8  # the last messages whose ends are positions as well, so that a next turn shares all of its history
UNIT_BYTES = 64  # unit of the length in a hash
DIGEST_BYTES = 9
CONTEXT_UNITS = 64  # assumed length of a context that a `parent_key` names
HASH_CHARS = 16  # 4 hexadecimal digits of the length, and the digest
# Parameters that determine the first tokens of a prompt, or which jobs may share cached prefixes
ROOT = ("cache_scope", "adapters", "tools", "template_args", "chat_template", "enable_thinking", "suffix")


def prefixes_of(task: str, queue: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the prefix hashes of a call's prompt, shortest prefix first, or "" if the prompt is short or missing.

    The call may be invalid. A chunk of a bulk run uses the hashes of its first line, because the lines are sorted.
    """
    kind = KINDS.get(task)
    given = {**dict(zip(kind.positional if kind else (), args, strict=False)), **kwargs}
    lines = given.get("lines")
    if isinstance(lines, list | tuple):
        params = lines[0].get("params") if lines and isinstance(lines[0], Mapping) else None
        given = dict(params) if isinstance(params, Mapping) else {}
    try:
        return "".join(_hashes(queue, given))
    except (TypeError, ValueError, RecursionError):  # not JSON
        return ""


def _hashes(queue: str, given: Mapping[str, Any]) -> list[str]:
    if (key := given.get("parent_key")) is not None:
        return [hash_of_context(str(key))]
    parts = _parts(given)
    num_bytes = sum(map(len, parts))
    positions: set[int] = set()
    position = float(MIN_BYTES)
    while position <= num_bytes and len(positions) < MAX_POSITIONS:
        positions.add(int(position))
        position *= GROWTH
    if not positions:
        return []
    end = num_bytes
    for part in reversed(parts[-MAX_MESSAGES:]):
        if end >= MIN_BYTES:
            positions.add(end)
        end -= len(part)
    root = _json([queue, {name: given[name] for name in ROOT if given.get(name)}])
    hasher, hashes, start, data = hashlib.blake2b(root, digest_size=DIGEST_BYTES), [], 0, b"".join(parts)
    for stop in sorted(positions):
        hasher.update(memoryview(data)[start:stop])
        hashes.append(_hash(stop // UNIT_BYTES, hasher.digest()))
        start = stop
    return hashes


def _parts(given: Mapping[str, Any]) -> list[bytes]:
    """Return the text of the prompt, or each message as JSON."""
    prompt, messages, system = given.get("prompt"), given.get("messages"), given.get("system")
    if isinstance(prompt, str):
        return [prompt.encode(errors="replace")]
    if isinstance(prompt, list | tuple):
        return [",".join(map(str, prompt)).encode()]
    if not isinstance(messages, list | tuple):
        return []
    first = [] if system is None else [{"role": "system", "content": system}]
    return [_json(message) for message in [*first, *messages]]


def hash_of_context(key: str) -> str:
    """Return the hash of a `finish_key`'s context. The script `write` computes the same hash."""
    return f"{CONTEXT_UNITS:04x}{key[: HASH_CHARS - 4]}"


def _hash(num_units: int, digest: bytes) -> str:
    return f"{min(num_units, 0xFFFF):04x}{base64.urlsafe_b64encode(digest).decode()}"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
