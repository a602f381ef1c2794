"""A FastAPI backend that streams stories to the browser as server-sent events. Start it with `uvicorn app:app`."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel

from cellama.api import AsyncClient, Event, JobError

PAGE = Path(__file__).with_name("index.html")


class Story(BaseModel):
    prompt: str
    max_tokens: int = 64


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Create the client for the whole process."""
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(JobError)
async def job_error(request: Request, error: JobError) -> JSONResponse:
    """Return status 400 for an invalid parameter, 404 for an unknown job, and 503 if Redis is unreachable."""
    return JSONResponse({"code": error.code, "message": str(error)}, error.http_status)


@app.exception_handler(RequestValidationError)
async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
    """Report an invalid body or header in the same format as `job_error`."""
    first = error.errors()[0]
    return JSONResponse({"code": "invalid_request", "message": f"{first['loc'][-1]}: {first['msg']}"}, 400)


@app.get("/")
async def page() -> FileResponse:
    return FileResponse(PAGE)


@app.post("/stories")
async def submit(story: Story, request: Request) -> dict[str, str]:
    """Queue a story. The job continues if the browser disconnects."""
    client: AsyncClient = request.app.state.client
    job = await client.generate("tiny", story.prompt, max_tokens=story.max_tokens)
    return {"id": job.id}


@app.get("/stories/{job_id}/events")
async def follow(job_id: str, request: Request, last_event_id: Annotated[int, Header(ge=-1)] = -1) -> Response:
    """Stream past and live events, starting after the last event that the browser has received."""
    client: AsyncClient = request.app.state.client
    position = await client.position(job_id)  # returns 404 for an unknown job instead of a broken stream
    if position.state == "done" and not [event async for event in client.stream(job_id, last_event_id)]:
        return Response(status_code=204)  # the browser has all events, so this status stops its EventSource
    return sse(client.stream(job_id, last_event_id, timeout=math.inf, ping=15))


@app.post("/stories/stream")
async def tell(story: Story, request: Request) -> StreamingResponse:
    """Stream a story to a single reader. Disconnecting cancels the job."""
    client: AsyncClient = request.app.state.client
    job = await client.generate("tiny", story.prompt, max_tokens=story.max_tokens)
    return sse(job.stream(timeout=math.inf, ping=15, cancel_on_exit=True))


def sse(events: AsyncIterator[Event]) -> StreamingResponse:
    """Send a job's events as server-sent events. Reconnecting browsers send the last `seq` as Last-Event-ID."""

    async def frames() -> AsyncIterator[str]:
        try:
            async for event in events:
                if event["type"] == "ping":
                    yield ": ping\n\n"
                else:
                    name = "failed" if event["type"] == "error" else event["type"]  # EventSource has its own `error`
                    yield f"id: {event['seq']}\nevent: {name}\ndata: {json.dumps(event)}\n\n"
        except JobError as error:  # for instance, Redis was unreachable for too long
            yield f"event: failed\ndata: {json.dumps({'code': error.code, 'message': str(error)})}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream", headers={"cache-control": "no-store"})
