"""The site's own Celery app. cellama's tasks have theirs; both use the same Redis, so that steps of both can meet."""

from celery import Celery

app = Celery("site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["tasks"], related_name=None)
