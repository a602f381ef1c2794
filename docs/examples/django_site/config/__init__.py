"""The site's configuration. It imports the Celery app, which `shared_task` needs."""

from .celery import app as celery_app

__all__ = ["celery_app"]
