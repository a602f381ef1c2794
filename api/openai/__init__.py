"""Convert OpenAI request bodies into job parameters, and results and events into responses, independently of HTTP.

This package may import `tasks.contract`. Bulk runs and the gateway use this package.
"""
