"""Convert Anthropic's request bodies into job parameters, and results and events into messages, without HTTP.

This package may import `tasks.contract`, `openai.parameters` for its `ParameterRule`, and `openai.answers`.
"""
