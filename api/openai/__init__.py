"""Convert OpenAI's request bodies into job parameters, and results and events into responses, without HTTP.

This package may import `tasks.contract`. It is used by bulk runs and the gateway.
"""
