"""Store the tokens of a `finish_key` in Redis, so that workers can continue contexts that other workers computed.

A context is written together with its job's last event, and is kept for as long as results. The context is stored under
its key. A reader uses the context only if the context's tokens have this key in the reader's scope
(attempt/engine_request.py), so keys don't work across scopes.
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
PLAIN, COMPRESSED, CONTINUED = range(3)  # formats; CONTINUED: the first tokens are those of another context
MIN_COMPRESSED_BYTES = 4096  # from this size on, compression halves the tokens and saves more time than it takes
HEADER = struct.Struct("<BBB16s")  # version, format, length of the identity, digest of the model; the identity follows
REFERENCE = struct.Struct("<32sI")  # key of the other context, and number of shared tokens
MAX_TOKEN_BYTES = 8 << 20  # for the tokens of one context, which is more than any context has


@dataclass(frozen=True, slots=True)
class KeptContext:
    """The tokens of a prompt and of the output that followed the prompt.

    `identity` identifies the engine that computed the tokens (docs/adr/014-kept-states.md).
    """

    model: str  # SHA-256 of the model file
    identity: bytes
    tokens: Sequence[int]


def pack(context: KeptContext) -> bytes:
    """Serialize a context into the value to store in Redis."""
    tokens = _bytes_of(context.tokens)
    if len(tokens) < MIN_COMPRESSED_BYTES:
        return _header(context, PLAIN) + tokens
    return _header(context, COMPRESSED) + zlib.compress(tokens, 1)


def pack_after(context: KeptContext, first: str, num_shared: int) -> bytes:
    """Return the value to store for a context that starts with the first `num_shared` tokens of the context `first`.

    The value contains only a reference to these tokens, so both contexts must be stored together.
    """
    return (
        _header(context, CONTINUED)
        + REFERENCE.pack(bytes.fromhex(first), num_shared)
        + _bytes_of(context.tokens[num_shared:])
    )


def read_context(redis: Redis, key: str, model: str, ttl_s: int) -> KeptContext | None:
    """Return the context for a key, and set the context's expiry to `ttl_s` seconds from now.

    `model` is the reader's model. If another model computed the context, the `model` of the returned context is "".
    Return None if the key has no context, or if the stored value is malformed.
    """
    found = _read(redis, key, ttl_s)
    if found is None:
        return None
    tokens = found.tokens
    if found.format == CONTINUED:
        first, num_shared = REFERENCE.unpack_from(tokens)
        other = _read(redis, first.hex(), ttl_s)
        if other is None or other.format == CONTINUED or len(other.tokens) < 4 * num_shared:
            return None
        tokens = other.tokens[: 4 * num_shared] + tokens[REFERENCE.size :]
    return KeptContext(model if found.model == _digest(model) else "", found.identity, _tokens_of(tokens))


def keep_context(redis: Redis, key: str, context: KeptContext, ttl_s: int) -> None:
    """Store a context that was found outside Redis, and set its expiry to `ttl_s` seconds from now."""
    if not redis.expire(context_key(key), ttl_s):
        redis.set(context_key(key), pack(context), ex=ttl_s)


class _Found(NamedTuple):
    format: int
    model: bytes  # digest of the model
    identity: bytes
    tokens: bytes


def _read(redis: Redis, key: str, ttl_s: int) -> _Found | None:
    pipeline = redis.pipeline(transaction=False)
    pipeline.get(context_key(key))
    pipeline.expire(context_key(key), ttl_s)
    value: bytes = pipeline.execute()[0] or b""
    try:
        version, format_, num_identity, model = HEADER.unpack_from(value)
        identity, tokens = value[HEADER.size :][:num_identity], value[HEADER.size + num_identity :]
        if format_ == COMPRESSED:
            decompressor = zlib.decompressobj()
            tokens = decompressor.decompress(tokens, MAX_TOKEN_BYTES)
            if not decompressor.eof:
                return None
    except (struct.error, zlib.error):
        return None
    min_bytes = REFERENCE.size if format_ == CONTINUED else 0
    if version != VERSION or format_ > CONTINUED or len(tokens) < min_bytes or (len(tokens) - min_bytes) % 4:
        return None
    return _Found(format_, model, identity, tokens)


def _header(context: KeptContext, format_: int) -> bytes:
    return HEADER.pack(VERSION, format_, len(context.identity), _digest(context.model)) + context.identity


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
