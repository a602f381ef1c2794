"""OpenAI's request and response formats without HTTP: bodies to parameters of jobs, results and events to responses.

This package may use `tasks.contract`. Bulk runs and the gateway call it.
"""
