"""Ways to damage a file with a state, as disks, crashes, other programs, other users and forgers do."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

HEAD_FIELDS = 64  # bytes of the fixed part of a header
HUGE = 1 << 60
Damage = Callable[[random.Random, Path, Path], None]


def damage(drawn: random.Random, path: Path, other: Path) -> str:
    """Damage the file at `path`, possibly with bytes of the valid file `other`, and return the kind of damage."""
    name = drawn.choice(sorted(KINDS))
    KINDS[name](drawn, path, other)
    return name


def _overwrite(path: Path, data: bytes | bytearray) -> None:
    path.unlink()
    path.touch(0o600)
    path.write_bytes(data)


def flip_bits(drawn: random.Random, path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in drawn.sample(range(len(data)), drawn.choice((1, 1, 2, 64))):
        data[place] ^= 1 << drawn.randrange(8)
    _overwrite(path, data)


def flip_bits_of_the_head(drawn: random.Random, path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[drawn.randrange(HEAD_FIELDS)] ^= 1 << drawn.randrange(8)
    _overwrite(path, data)


def cut(drawn: random.Random, path: Path, other: Path) -> None:
    os.truncate(path, drawn.choice((0, 1, HEAD_FIELDS, drawn.randrange(path.stat().st_size), path.stat().st_size - 1)))


def grow(drawn: random.Random, path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size + drawn.choice((1, 4096, 1 << 24)))


def lose_a_page(drawn: random.Random, path: Path, other: Path) -> None:
    """Clear a page, as after a power failure when the file system has written only the length."""
    data = bytearray(path.read_bytes())
    start = drawn.randrange(0, len(data), 4096)
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    _overwrite(path, data)


def take_a_part_of_another(drawn: random.Random, path: Path, other: Path) -> None:
    data, foreign = bytearray(path.read_bytes()), other.read_bytes()
    start = drawn.randrange(min(len(data), len(foreign)))
    length = drawn.randrange(32, 100_000)
    data[start : start + length] = foreign[start : start + length]
    data += b"\0" * (data == path.read_bytes())  # so that the data differ
    _overwrite(path, data)


def be_another(drawn: random.Random, path: Path, other: Path) -> None:
    _overwrite(path, other.read_bytes())


def be_of_another_version(drawn: random.Random, path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, drawn.choice((0, 1, 3, 0xFFFFFFFF)))
    _overwrite(path, _with_digest(data))


def tell_huge_lengths(drawn: random.Random, path: Path, other: Path) -> None:
    """Write huge lengths with a valid digest, because lengths must be checked separately."""
    data = bytearray(path.read_bytes())
    (head_bytes,) = struct.unpack_from("<I", data, 12)
    if drawn.random() < 0.3:  # the length of a part
        struct.pack_into("<Q", data, head_bytes - 32 - 32 + 8, drawn.choice((HUGE, 2**64 - 1, 2**63, 0)))
    else:
        place = drawn.choice((12, 16, 20, 24, 28))
        struct.pack_into("<I", data, place, drawn.choice((2**32 - 1, 2**31, 1 << 24, 1 << 20)))
    _overwrite(path, _with_digest(data, head_bytes))


def be_foreign(drawn: random.Random, path: Path, other: Path) -> None:
    beginnings = (b"\x7fELF", b"ggsq\x09\0\0\0", b"GGUF", b"PK\x03\x04", b"", b"cellamKV", bytes(4096))
    _overwrite(path, drawn.choice(beginnings) + drawn.randbytes(drawn.choice((0, 10, 5000))))


def be_empty(drawn: random.Random, path: Path, other: Path) -> None:
    _overwrite(path, b"")


def be_a_link(drawn: random.Random, path: Path, other: Path) -> None:
    """Replace the file with a link to itself, to nothing, to an endless device, or to a valid file elsewhere."""
    away = path.with_name(f"away-{path.stem}")
    os.replace(path, away)
    path.symlink_to(drawn.choice((away, path, Path("/dev/zero"), Path("/nowhere"))))


def be_a_folder(drawn: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_pipe(drawn: random.Random, path: Path, other: Path) -> None:
    """Replace the file with a pipe, which blocks a reader until a writer opens it."""
    path.unlink()
    os.mkfifo(path, 0o600)


def be_a_socket(drawn: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{descriptor}/{path.name[:40]}")
        os.replace(path.with_name(path.name[:40]), path)
    finally:
        os.close(descriptor)


def be_open_to_others(drawn: random.Random, path: Path, other: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) | drawn.choice((0o040, 0o020, 0o004, 0o002, 0o077)))


def be_of_another_user(drawn: random.Random, path: Path, other: Path) -> None:
    os.chown(path, 12345, -1)


def vanish(drawn: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def _with_digest(data: bytearray, head_bytes: int | None = None) -> bytearray:
    """Return the data with a valid digest of the header."""
    if head_bytes is None:
        (head_bytes,) = struct.unpack_from("<I", data, 12)
    data[head_bytes - 32 : head_bytes] = sha256(data[: head_bytes - 32]).digest()
    return data


KINDS: dict[str, Damage] = {
    "bits": flip_bits,
    "bits of the header": flip_bits_of_the_head,
    "cut": cut,
    "longer": grow,
    "lost page": lose_a_page,
    "part of another": take_a_part_of_another,
    "another's name": be_another,
    "version": be_of_another_version,
    "huge lengths": tell_huge_lengths,
    "foreign": be_foreign,
    "empty": be_empty,
    "link": be_a_link,
    "folder": be_a_folder,
    "pipe": be_a_pipe,
    "open to others": be_open_to_others,
    "vanished": vanish,
}
if os.path.isdir("/proc/self/fd"):
    KINDS["socket"] = be_a_socket
if os.geteuid() == 0:
    KINDS["another user"] = be_of_another_user
