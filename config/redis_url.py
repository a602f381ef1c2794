"""Parse and mask Redis URLs, which can name a server with or without TLS, a Unix socket, or sentinels."""

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
    "server": _TLS_OPTIONS,  # accepted without effect, as in redis-py
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
_IN_EACH_ADDRESS = re.compile(r"((?://|;)[^:@/;?#]*):[^/;?#]*@")
_SCHEME = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_NO_PORT = re.compile(r"(//[^:/]*):(?!\d+(?:/|$))[^/]*")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The components of a Redis URL, as `parse_redis_url` returns them."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()  # host and port of the server or of each sentinel
    path: str = ""  # path of the socket
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    master_name: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, str], ...] = ()  # names and values of options; kind "tls" always has ssl_cert_reqs

    @property
    def credentials(self) -> str:
        """Return the credentials as `USER:PASSWORD@` for use in a URL, or "" if there are none."""
        if self.username is None and self.password is None:
            return ""
        return f"{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@"


def parse_redis_url(url: str) -> RedisUrl:
    """Parse a Redis URL. Raises ValueError with a message that contains no secrets."""
    scheme, found, rest = url.strip().partition("://")
    kind = _KINDS.get(scheme.lower())
    if not found or kind is None:
        raise ValueError(FORMS)
    try:
        if kind == "sentinel":
            return _sentinel(rest)
        return _socket(rest) if kind == "socket" else _server(kind, rest)
    except _InvalidUrl as error:
        raise ValueError(str(error)) from None
    except ValueError:  # from urllib, whose message may contain a part of the password
        raise ValueError(
            f"the URL can't be parsed; {FORMS}. Write /, @, :, ? and # in a password as %2F, %40, …"
        ) from None


class _InvalidUrl(ValueError):
    """An error in a URL. The error message contains no secrets."""


def _server(kind: Kind, rest: str) -> RedisUrl:
    parts = urlsplit(f"//{rest}")
    if not parts.hostname:
        raise _InvalidUrl(FORMS)
    options = _options(kind, parts)
    checks = options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    if checks not in _CHECKS:
        raise _InvalidUrl(f"ssl_cert_reqs is {checks!r}; it must be required, optional or none")
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
        raise _InvalidUrl("the socket path must be absolute, with three slashes, as in unix:///run/redis.sock")
    username, password = _credentials(parts)
    db = _db(options.get("db") or options.get("virtual_host") or "")
    return RedisUrl(kind="socket", hosts=(), path=unquote(parts.path), db=db, username=username, password=password)


def _sentinel(rest: str) -> RedisUrl:
    addresses, tail = _split_addresses(rest.replace("sentinel://", ""))  # Celery writes the scheme before each address
    parts = [urlsplit(f"//{address}") for address in addresses]
    last = urlsplit(f"//h{tail}")
    options = _options("sentinel", last)
    if not all(part.hostname and "," not in part.hostname for part in parts):
        raise _InvalidUrl(
            "sentinels must be separated by semicolons: sentinel://HOST:PORT;HOST:PORT/DB?master_name=NAME"
        )
    if not options.get("master_name"):
        raise _InvalidUrl("the master name is missing; add ?master_name=NAME")
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


def _split_addresses(rest: str) -> tuple[list[str], str]:
    """Return the sentinels' addresses, and the text after the last address.

    If any other address contains a database, this database is ignored.
    """
    chunks = rest.split(";")
    end = min((at for at in map(chunks[-1].find, "/?") if at >= 0), default=len(chunks[-1]))
    addresses = [chunk.partition("/")[0] for chunk in chunks[:-1]] + [chunks[-1][:end]]
    return addresses, chunks[-1][end:]


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    username, password = parts.username, parts.password
    return (unquote(username) if username else None, unquote(password) if password else None)


def _options(kind: Kind, parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query))
    unknown = sorted(set(options) - _OPTIONS[kind])
    if unknown:
        known = ", ".join(sorted(_OPTIONS[kind]))
        raise _InvalidUrl(f"unknown option {unknown[0]!r} for this kind of URL; choose from {known}")
    return options


def _db(text: str) -> int:
    number = text.strip("/")
    if not number:
        return 0
    if not number.isdecimal():
        raise _InvalidUrl("the database must be a number, as in redis://HOST:PORT/0")
    return int(number)


def mask_url(url: str) -> str:
    """Return the URL with its passwords replaced by `***`, so it is safe to log. The URL may be invalid."""
    url = _SECRET.sub(r"\1***", url)
    try:
        kind = parse_redis_url(url).kind
    except ValueError:
        return _mask_roughly(url)
    return (_IN_EACH_ADDRESS if kind == "sentinel" else _IN_SERVER).sub(r"\1:***@", url)


def _mask_roughly(url: str) -> str:
    """Mask everything that could be a password in an invalid URL."""
    scheme = _SCHEME.match(url)
    _, at, host = url.rpartition("@")
    if at:
        return f"{scheme[0] if scheme else ''}***@{host}"
    return _NO_PORT.sub(r"\1:***", url)
