"""OpenAI's forms, without HTTP: bodies of requests → parameters of jobs, results and events → bodies and chunks.

May use: `tasks.contract`. Bulk runs and the gateway are its callers.
"""
