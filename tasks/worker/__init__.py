"""A worker process: its models, and the threads that look after jobs and after the worker itself.

May use: `publishing`, `app`, and what is above these; the engine. In workers only.
"""
