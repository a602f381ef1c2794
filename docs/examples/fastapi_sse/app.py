"""A web backend with FastAPI that streams stories as server-sent events: uvicorn app:app"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from cellama.api import AsyncClient, Event, JobError


class Story(BaseModel):
    prompt: str
    max_tokens: int = 64


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client serves the whole process."""
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(JobError)
async def job_error(request: Request, error: JobError) -> JSONResponse:
    """A wrong parameter is a 400, an unknown job a 404, a Redis that is away a 503."""
    return JSONResponse({"code": error.code, "message": str(error)}, error.http_status)


@app.post("/stories")
async def submit(story: Story, request: Request) -> dict[str, str]:
    """Queues a story. Who asked may leave: the job goes on."""
    client: AsyncClient = request.app.state.client
    job = await client.generate("tiny", story.prompt, max_tokens=story.max_tokens)
    return {"id": job.id}


@app.get("/stories/{job_id}/events")
async def follow(job_id: str, request: Request) -> StreamingResponse:
    """What has been, then what comes. A browser that comes back says where it was."""
    client: AsyncClient = request.app.state.client
    await client.position(job_id)  # an unknown job is an answer with a status, not a broken stream
    after = int(request.headers.get("last-event-id", -1))
    return sse(client.stream(job_id, after=after, ping=15))


@app.post("/stories/stream")
async def tell(story: Story, request: Request) -> StreamingResponse:
    """A story for this one reader: if it goes away, the job is cancelled."""
    client: AsyncClient = request.app.state.client
    job = await client.generate("tiny", story.prompt, max_tokens=story.max_tokens)
    return sse(job.stream(ping=15, cancel_on_exit=True))


def sse(events: AsyncIterator[Event]) -> StreamingResponse:
    """Events of a job as server-sent events; `seq` is the id that a browser sends back as Last-Event-ID."""

    async def lines() -> AsyncIterator[str]:
        async for event in events:
            if event["type"] == "ping":
                yield ": ping\n\n"
            else:
                yield f"id: {event['seq']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})
