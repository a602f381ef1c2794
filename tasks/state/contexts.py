"""The tokens behind a `finish_key`, in Redis: a worker that never had a context goes on after it all the same.

A context is written with the end of its job, and lives as long as a result. It is found under its key, and counts only
if its tokens have that key for the job that asks (attempt/engine_request.py). A key of another scope finds nothing.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from redis import Redis

from cellama.tasks.contract.keys import context_key

VERSION = 1
PLAIN, PACKED, AFTER = range(3)  # how tokens stand there; AFTER: the first ones are those of another context
PACKED_BYTES = 4096  # from here on zlib halves them in less time than Redis takes for the rest
HEAD = struct.Struct("<BBB16s")  # version, form, bytes of the identity, digest of the model; then the identity
PART = struct.Struct("<32sI")  # key of the other context, tokens of it
MAX_BYTES = 8 << 20  # of the tokens of one context: more than any has


@dataclass(frozen=True, slots=True)
class KeptContext:
    """What was read and generated. `identity` is of the engine that did (docs/adr/014-kept-states.md)."""

    model: str  # SHA-256 of its file
    identity: bytes
    tokens: Sequence[int]


def pack(context: KeptContext) -> bytes:
    """A context as Redis keeps it."""
    tokens = _bytes_of(context.tokens)
    if len(tokens) < PACKED_BYTES:
        return _head(context, PLAIN) + tokens
    return _head(context, PACKED) + zlib.compress(tokens, 1)


def pack_after(context: KeptContext, first: str, num_shared: int) -> bytes:
    """A context that begins with so many tokens of one with the key `first`, which is kept with it."""
    return _head(context, AFTER) + PART.pack(bytes.fromhex(first), num_shared) + _bytes_of(context.tokens[num_shared:])


def read_context(redis: Redis, key: str, model: str, ttl_s: int) -> KeptContext | None:
    """The context of a key, which stays for `ttl_s` from now on; `model` is that of the one who asks, and the context's
    is "" if it is another one. None if there is none, or what is there is no context of ours."""
    found = _read(redis, key, ttl_s)
    if found is None:
        return None
    tokens = found.tokens
    if found.form == AFTER:
        first, num_shared = PART.unpack_from(tokens)
        other = _read(redis, first.hex(), ttl_s)
        if other is None or other.form == AFTER or len(other.tokens) < 4 * num_shared:
            return None
        tokens = other.tokens[: 4 * num_shared] + tokens[PART.size :]
    return KeptContext(model if found.model == _digest(model) else "", found.identity, _tokens_of(tokens))


def keep_context(redis: Redis, key: str, context: KeptContext, ttl_s: int) -> None:
    """A context that was found elsewhere is in Redis for `ttl_s` from now on, too."""
    if not redis.expire(context_key(key), ttl_s):
        redis.set(context_key(key), pack(context), ex=ttl_s)


class _Found(NamedTuple):
    form: int
    model: bytes  # its digest
    identity: bytes
    tokens: bytes


def _read(redis: Redis, key: str, ttl_s: int) -> _Found | None:
    pipeline = redis.pipeline(transaction=False)
    pipeline.get(context_key(key))
    pipeline.expire(context_key(key), ttl_s)
    value: bytes = pipeline.execute()[0] or b""
    try:
        version, form, num_identity, model = HEAD.unpack_from(value)
        identity, tokens = value[HEAD.size :][:num_identity], value[HEAD.size + num_identity :]
        if form == PACKED:
            unpacking = zlib.decompressobj()
            tokens = unpacking.decompress(tokens, MAX_BYTES)
            if not unpacking.eof:
                return None
    except (struct.error, zlib.error):
        return None
    least = PART.size if form == AFTER else 0
    if version != VERSION or form > AFTER or len(tokens) < least or (len(tokens) - least) % 4:
        return None
    return _Found(form, model, identity, tokens)


def _head(context: KeptContext, form: int) -> bytes:
    return HEAD.pack(VERSION, form, len(context.identity), _digest(context.model)) + context.identity


def _digest(model: str) -> bytes:
    return hashlib.sha256(model.encode()).digest()[:16]


def _bytes_of(tokens: Sequence[int]) -> bytes:
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _tokens_of(packed: bytes) -> Sequence[int]:
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
