"""What we are compared with: llama.cpp's own programs, the task that one would write first, plain Celery.

May use: `harness`.
"""
