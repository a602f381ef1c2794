"""Render the console's pages from templates. All values inserted by a template are escaped."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from cellama.api.http.errors import ApiError

from .session import base_of, is_admin
from .visible import visible

TEMPLATES, STATIC = (Path(__file__).parent / name for name in ("templates", "static"))
STATIC_ROUTE = Mount("/console/static", StaticFiles(directory=STATIC, check_dir=False))
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, browsers would send forms with `Origin: null`
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class ConsoleSection:
    """A navigation entry. `path` is appended to the console's path."""

    title: str
    path: str
    admins_only: bool = False


NAVIGATION = (
    ConsoleSection("Overview", ""),
    ConsoleSection("Jobs", "/jobs"),
    ConsoleSection("Chat", "/chat"),
    ConsoleSection("Runs", "/runs"),
    ConsoleSection("Tenants", "/tenants", admins_only=True),
    ConsoleSection("Keys", "/keys", admins_only=True),
)


def page(
    request: Request, template: str, *, status: int = 200, headers: Mapping[str, str] | None = None, **context: Any
) -> Response:
    """Render a page or page fragment. If `console_caller` has identified a visitor, show what this visitor may see."""
    caller = getattr(request.state, "console_caller", None)
    base = base_of(request)
    sections = [one for one in NAVIGATION if caller is not None and (is_admin(caller) or not one.admins_only)]
    text = (
        _environment()
        .get_template(template)
        .render(
            base=base,
            caller=caller,
            is_admin=caller is not None and is_admin(caller),
            navigation=[(one.title, base + one.path, _is_current(request, base + one.path)) for one in sections],
            static=lambda name: f"{base}/static/{name}?v={_version_of(name)}",
            **context,
        )
    )
    return Response(text, status, {**SECURITY_HEADERS, **(headers or {})}, media_type="text/html")


def fragment(request: Request, template: str, **context: Any) -> Response:
    """Render a page fragment that the browser requests repeatedly, or return 304 if the fragment has not changed.

    The ETag is a digest of the context, so an unchanged fragment isn't rendered. Therefore, the context must contain
    display text, such as "3 min ago", instead of numbers that always change.
    """
    shown = repr((template, base_of(request), is_admin(request.state.console_caller), context))
    etag = f'"{hashlib.blake2b(shown.encode(), digest_size=16).hexdigest()}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={**SECURITY_HEADERS, "etag": etag})
    return page(request, template, headers={"etag": etag}, **context)


def _is_current(request: Request, path: str) -> bool:
    current = request.url.path.rstrip("/")
    return current == path or (path != base_of(request) and current.startswith(f"{path}/"))


def is_console_page(request: Request) -> bool:
    """Return whether a browser is requesting a console page, in which case errors should also be pages."""
    base, path = base_of(request), request.url.path
    return (path == base or path.startswith(f"{base}/")) and "text/html" in request.headers.get("accept", "")


def error_page(request: Request, error: ApiError) -> Response:
    """Return an error page."""
    title = HTTPStatus(error.status).phrase if error.status in set(HTTPStatus) else "Error"
    return page(
        request, "error.html", status=error.status, headers=error.headers, title=title, message=_sentence(error.message)
    )


def _sentence(message: str) -> str:
    return f"{message[:1].upper()}{message[1:]}."


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=duration_text,
        precise=precise_text,
        count=count_text,
        bytes=bytes_text,
        utc=utc_text,
        iso=iso_text,
        visible=visible,
    )
    return environment


@functools.cache
def _version_of(name: str) -> str:
    """Return a static file's checksum, which makes browsers reload the file after an upgrade."""
    return f"{zlib.crc32((STATIC / name).read_bytes()):08x}"


def duration_text(seconds: float | None) -> str:
    """Format a duration for display, such as "0.4 s", "12 s", "3 min 20 s" or "4 d 2 h", or return "–" for None."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= unit_s:
            rest = total % unit_s // part_s
            return f"{total // unit_s} {unit}" + (f" {rest} {part}" if rest else "")
    raise AssertionError("unreachable")


def age_text(seconds: float) -> str:
    """Format an age in a single unit so that the text rarely changes, such as "12 s ago", "3 min ago" or "4 d ago"."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def precise_text(seconds: float) -> str:
    """Format a duration as `duration_text` does, or in milliseconds if it is shorter than a second."""
    return f"{max(0.0, seconds) * 1000:.0f} ms" if seconds < 1 else duration_text(seconds)


def count_text(number: float | None) -> str:
    """Format a number with narrow spaces as thousands separators, or return "–" for None."""
    return "–" if number is None else f"{number:,.0f}".replace(",", "\u202f")


def bytes_text(num_bytes: int) -> str:
    """Format a size for display, such as "512 B", "1.5 MiB" or "20 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def utc_text(at: float | None) -> str:
    """Format a time in Unix seconds as "2026-01-31 12:00:00 UTC", or return "–" for None."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso_text(at: float) -> str:
    """Format a time in Unix seconds for HTML's `datetime` attribute."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
