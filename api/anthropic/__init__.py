"""Anthropic's request and response formats without HTTP: bodies to parameters, results and events to messages.

This package may use `tasks.contract`, `openai.parameters` for its `ParameterRule`, and `openai.answers`.
"""
