"""Convert Anthropic request bodies into job parameters, and results and events into Anthropic messages, without HTTP.

This package may import `tasks.contract`, `openai.parameters` (only `ParameterRule`) and `openai.answers`.
"""
