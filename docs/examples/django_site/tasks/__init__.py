"""The site's own tasks, which run before and after the model."""

from __future__ import annotations

from typing import Any

from celery import shared_task


@shared_task
def prompt_for(animal: str) -> str:
    return f"Once upon a time, there was a little {animal}"


@shared_task
def title_of(result: dict[str, Any]) -> str:
    return " ".join(result["text"].split()[:6])
