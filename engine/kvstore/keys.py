"""Context keys, which are computed as a chain of SHA-256 digests over blocks of token ids.

All functions in this module are pure. The chain starts with a seed, which covers the weights, the adapters with their
scales, and the scope. With different seeds, the same tokens have different keys.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256

BLOCK = 64  # tokens; computing fewer tokens is faster than finding and reading a file
DIGEST_BYTES = 32
_KEY = re.compile(r"[0-9a-f]{64}\Z")


def is_key(text: str) -> bool:
    """Return whether the string consists of 64 lowercase hexadecimal digits.

    Only valid keys may become part of a path.
    """
    return _KEY.match(text) is not None


def seed_of(identity: bytes, adapters: Sequence[tuple[str, float]], scope: str) -> bytes:
    """Return a 32-byte digest of the scope and of everything else that determines the cells, except the tokens.

    `adapters` contains pairs of a fingerprint and a scale, in any order. Adapters are identified by their fingerprints,
    because a name may refer to different weights later.
    """
    parts = [b"cellama kv seed 1", identity, scope.encode("utf-8", "surrogatepass")]
    for fingerprint, scale in sorted((name, float(scale) + 0.0) for name, scale in adapters):
        parts += [fingerprint.encode("utf-8", "surrogatepass"), struct.pack("<d", scale)]
    # Each part is preceded by its length, so that different parts never have the same concatenation.
    return sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()


def as_array(tokens: Sequence[int]) -> array[int]:
    """Return the token ids as an array of type "I". An array of this type is returned without copying it.

    Raises ValueError if an id is out of range.
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be whole numbers from 0 to {2**32 - 1}: {error}") from error


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the token ids as packed uint32 values. Raises ValueError if an id is out of range."""
    return as_array(tokens).tobytes()


def block_keys(seed: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return one digest for each full block.

    A digest covers its block and all blocks before it. An incomplete last block has no digest.
    """
    return _chain(seed, pack_tokens(tokens))


def key_of(seed: bytes, tokens: Sequence[int]) -> str:
    """Return the key of a context, which consists of 64 hexadecimal digits."""
    return key_and_blocks(seed, pack_tokens(tokens))[0]


def key_and_blocks(seed: bytes, packed: bytes) -> tuple[str, list[bytes]]:
    """Return the key and the block keys of a context, given its packed tokens."""
    chain = _chain(seed, packed)
    last = sha256(b"end")  # so that a key never equals the digest of a block
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
