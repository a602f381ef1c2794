"""The peers of the comparisons: llama.cpp's own programs, a naive Celery task, and plain Celery.

This package may import `harness`.
"""
