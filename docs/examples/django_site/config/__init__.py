"""The configuration of the site. It imports the Celery app, so that `shared_task` finds it."""

from .celery import app as celery_app

__all__ = ["celery_app"]
