"""Parse bodies, and find models by the names that Ollama clients send. The names may have the tag `:latest`."""

from __future__ import annotations

from starlette.requests import Request

from cellama.api.http.auth import Caller
from cellama.api.http.gateway import EVERY_MODEL, Gateway
from cellama.api.http.parsing import BODY_TYPE, ParsedRequest, read
from cellama.api.ollama.answers import LATEST
from cellama.tasks.contract.shapes.workers import ModelView

# Some clients send no type, and curl sends the type of forms. `check_origin` rejects pages of other sites.
BODY_TYPES = (BODY_TYPE, "", "application/x-www-form-urlencoded")


async def read_body(request: Request) -> ParsedRequest:
    """Parse a request's body, as `read` does."""
    return await read(request, BODY_TYPES)


async def find_named(gateway: Gateway, caller: Caller, name: object) -> ModelView:
    """Return the model with this name.

    If no model has this name, ignore the tag `:latest`. Raises the errors of `find_model`.
    """
    if isinstance(name, str) and name.endswith(LATEST):
        ids = [view["id"] for view in await gateway.listed_models(EVERY_MODEL)]
        name = name if name in ids else name.removesuffix(LATEST)
    return await gateway.find_model(caller, name)
