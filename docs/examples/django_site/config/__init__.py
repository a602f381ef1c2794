"""The site's set-up. Its Celery app is loaded with it, so that `shared_task` finds it."""

from .celery import app as celery_app

__all__ = ["celery_app"]
