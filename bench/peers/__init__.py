"""The peers that cellama is compared with, such as llama.cpp's programs, a naive Celery task, and plain Celery.

This package may import `harness`.
"""
