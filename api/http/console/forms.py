"""Read the forms sent by the console's pages."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.requests import Request

from cellama.api.http.errors import ApiError

MAX_FORM_BYTES = 64 << 10  # of a form without a file; longer inputs are sent to the API instead
MAX_FIELDS = 200


async def form_of(request: Request, max_bytes: int = MAX_FORM_BYTES) -> dict[str, str]:
    """Return the fields of a form with the type `application/x-www-form-urlencoded`. Raises ApiError (400 or 413)."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the form has more than {max_bytes} bytes; shorten its fields", code="too_many_bytes")
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise ApiError(400, f"the form can't be read: {error}; submit the form with the button on the page") from None
    return {name: text.strip() for name, text in pairs}
