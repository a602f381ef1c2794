"""The site's own Celery app. It uses the same Redis as cellama's app, so a canvas can contain steps of both."""

from celery import Celery

app = Celery("site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["tasks"], related_name=None)
