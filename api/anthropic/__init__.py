"""Anthropic's request and response formats without HTTP: bodies to parameters, results and events to messages.

May use: `tasks.contract`, `openai.parameters` for its `ParameterRule`, and `openai.answers`.
"""
