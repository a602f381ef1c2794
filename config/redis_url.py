"""Where Redis is, from one URL: a server, a server with TLS, a unix socket, or a master that sentinels know."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

Kind = Literal["server", "tls", "socket", "sentinel"]
_KINDS: dict[str, Kind] = {
    "redis": "server",
    "rediss": "tls",
    "unix": "socket",
    "redis+socket": "socket",
    "sentinel": "sentinel",
}
_TLS_OPTIONS = {"ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_OPTIONS: dict[Kind, set[str]] = {
    "server": _TLS_OPTIONS,  # without effect, as redis-py has it
    "tls": _TLS_OPTIONS,
    "socket": {"db", "virtual_host"},
    "sentinel": {"master_name", "sentinel_username", "sentinel_password"},
}
_CHECKS = ("required", "optional", "none")
FORMS = (
    "it must look like redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS), unix:///PATH?db=DB, "
    "or sentinel://HOST:PORT;HOST:PORT/DB?master_name=NAME"
)
_SECRET = re.compile(r"([?&]\w*password=)[^&#]*", re.IGNORECASE)
_IN_SERVER = re.compile(r"(//[^:@/?#]*):[^/?#]*@")
_IN_EACH_PLACE = re.compile(r"((?://|;)[^:@/;?#]*):[^/;?#]*@")
_SCHEME = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_NO_PORT = re.compile(r"(//[^:/]*):(?!\d+(?:/|$))[^/]*")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What the setting `redis_url` says. Made by `parse_redis_url`."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()  # of the server, or of the sentinels
    path: str = ""  # of the socket
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    master_name: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, str], ...] = ()  # options by name; ssl_cert_reqs is always among those of kind tls

    @property
    def credentials(self) -> str:
        """USER:PASSWORD@ as it stands in a URL; nothing without a password."""
        if self.username is None and self.password is None:
            return ""
        return f"{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@"


def parse_redis_url(url: str) -> RedisUrl:
    """The parts of a URL. Raises ValueError, which says what is wrong and shows no secret."""
    scheme, found, rest = url.strip().partition("://")
    kind = _KINDS.get(scheme.lower())
    if not found or kind is None:
        raise ValueError(FORMS)
    try:
        if kind == "sentinel":
            return _sentinel(rest)
        return _socket(rest) if kind == "socket" else _server(kind, rest)
    except _Wrong as error:
        raise ValueError(str(error)) from None
    except ValueError:  # of urllib; its text may hold a part of the password
        raise ValueError(f"it can't be read; {FORMS}. Write /, @, :, ? and # in a password as %2F, %40, …") from None


class _Wrong(ValueError):
    """Says what is wrong with a URL, in words that show no secret."""


def _server(kind: Kind, rest: str) -> RedisUrl:
    parts = urlsplit(f"//{rest}")
    if not parts.hostname:
        raise _Wrong(FORMS)
    options = _options(kind, parts)
    checks = options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    if checks not in _CHECKS:
        raise _Wrong(f"ssl_cert_reqs is {checks!r}; it must be required, optional or none")
    tls = {**options, "ssl_cert_reqs": checks} if kind == "tls" else {}
    username, password = _credentials(parts)
    port = parts.port or 6379
    return RedisUrl(
        kind=kind,
        hosts=((parts.hostname, port),),
        path="",
        db=_db(parts.path),
        username=username,
        password=password,
        tls=tuple(sorted(tls.items())),
    )


def _socket(rest: str) -> RedisUrl:
    parts = urlsplit(f"//{rest}")
    options = _options("socket", parts)
    if parts.hostname or len(parts.path) < 2:
        raise _Wrong("the path of the socket must be absolute: unix:///run/redis.sock, with three slashes")
    username, password = _credentials(parts)
    db = _db(options.get("db") or options.get("virtual_host") or "")
    return RedisUrl(kind="socket", hosts=(), path=unquote(parts.path), db=db, username=username, password=password)


def _sentinel(rest: str) -> RedisUrl:
    places, tail = _split_places(rest.replace("sentinel://", ""))  # Celery writes it before each one
    parts = [urlsplit(f"//{place}") for place in places]
    last = urlsplit(f"//h{tail}")
    options = _options("sentinel", last)
    if not all(part.hostname and "," not in part.hostname for part in parts):
        raise _Wrong("between two sentinels stands a semicolon: sentinel://HOST:PORT;HOST:PORT/DB?master_name=NAME")
    if not options.get("master_name"):
        raise _Wrong("it does not say which master the sentinels shall name; add ?master_name=NAME")
    username, password = next(filter(any, map(_credentials, parts)), (None, None))
    return RedisUrl(
        "sentinel",
        tuple((part.hostname or "", part.port or 26379) for part in parts),
        db=_db(last.path),
        username=username,
        password=password,
        master_name=options["master_name"],
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
    )


def _split_places(rest: str) -> tuple[list[str], str]:
    """The places of the sentinels, and what follows the last one; each may have a database of its own behind it."""
    chunks = rest.split(";")
    end = min((at for at in map(chunks[-1].find, "/?") if at >= 0), default=len(chunks[-1]))
    places = [chunk.partition("/")[0] for chunk in chunks[:-1]] + [chunks[-1][:end]]
    return places, chunks[-1][end:]


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    username, password = parts.username, parts.password
    return (unquote(username) if username else None, unquote(password) if password else None)


def _options(kind: Kind, parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query))
    unknown = sorted(set(options) - _OPTIONS[kind])
    if unknown:
        known = ", ".join(sorted(_OPTIONS[kind]))
        raise _Wrong(f"there is no option {unknown[0]!r} for this form of URL; known: {known}")
    return options


def _db(text: str) -> int:
    number = text.strip("/")
    if not number:
        return 0
    if not number.isdecimal():
        raise _Wrong("the database must be a number, as in redis://HOST:PORT/0")
    return int(number)


def mask_url(url: str) -> str:
    """The URL for people and logs: with `***` in place of its passwords, whatever it looks like."""
    url = _SECRET.sub(r"\1***", url)
    try:
        kind = parse_redis_url(url).kind
    except ValueError:
        return _mask_roughly(url)
    return (_IN_EACH_PLACE if kind == "sentinel" else _IN_SERVER).sub(r"\1:***@", url)


def _mask_roughly(url: str) -> str:
    """Hides more than is needed: in what can't be read, a password may end anywhere."""
    scheme = _SCHEME.match(url)
    _, at, host = url.rpartition("@")
    if at:
        return f"{scheme[0] if scheme else ''}***@{host}"
    return _NO_PORT.sub(r"\1:***", url)
