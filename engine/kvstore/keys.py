"""Keys of contexts: a SHA-256 chain over blocks of token ids. Pure.

The same tokens have another key with other weights, adapters, scales or scope: all of that is in the seed.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256

BLOCK = 64  # tokens: fewer are computed sooner than a file is found and read
DIGEST_BYTES = 32
_KEY = re.compile(r"[0-9a-f]{64}\Z")


def is_key(text: str) -> bool:
    """True for 64 hex digits in lower case. Only a key becomes part of a path."""
    return _KEY.match(text) is not None


def seed_of(identity: bytes, adapters: Sequence[tuple[str, float]], scope: str) -> bytes:
    """Return 32 bytes that stand for all that cells depend on except for tokens, and for who may see them.

    `adapters` has a fingerprint (a name may mean other weights tomorrow) and a scale each, in any order.
    """
    parts = [b"cellama kv seed 1", identity, scope.encode("utf-8", "surrogatepass")]
    for fingerprint, scale in sorted((name, float(scale) + 0.0) for name, scale in adapters):
        parts += [fingerprint.encode("utf-8", "surrogatepass"), struct.pack("<d", scale)]
    # Each with its length: parts never run into each other.
    return sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def as_array(tokens: Sequence[int]) -> array[int]:
    """Return token ids as an array of type "I", which is not copied. Raises ValueError for other numbers."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are whole numbers from 0 to {2**32 - 1}: {error}") from error


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as uint32. Raises ValueError for other numbers."""
    return as_array(tokens).tobytes()


def block_keys(seed: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return a digest for each full block, of the block and all before it; the tail has none."""
    return _chain(seed, pack_tokens(tokens))


def key_of(seed: bytes, tokens: Sequence[int]) -> str:
    """Return the key of a context: 64 hex digits."""
    return key_and_blocks(seed, pack_tokens(tokens))[0]


def key_and_blocks(seed: bytes, packed: bytes) -> tuple[str, list[bytes]]:
    """Return the key of a context and its block keys, for packed tokens."""
    chain = _chain(seed, packed)
    last = sha256(b"end")  # a key is never the digest of a block
    last.update(chain[-1] if chain else seed)
    last.update(struct.pack("<Q", len(packed) // 4))
    last.update(packed[len(chain) * BLOCK * 4 :])
    return last.hexdigest(), chain


def _chain(seed: bytes, packed: bytes) -> list[bytes]:
    size = BLOCK * 4
    digests = []
    digest = seed
    for start in range(0, len(packed) - size + 1, size):
        digest = sha256(digest + packed[start : start + size]).digest()
        digests.append(digest)
    return digests
