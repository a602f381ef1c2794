"""Minimal Django settings for the example."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "not a secret, because this is an example")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "config.urls"
USE_TZ = True

CELERY_BROKER_URL = os.environ.get("CELLAMA_REDIS_URL", "redis://127.0.0.1:6379/0")
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_TASK_DEFAULT_QUEUE = "site"
