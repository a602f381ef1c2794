"""Anthropic's forms, without HTTP: bodies of requests → parameters of jobs, results and events → bodies and events.

May use: `tasks.contract`, `openai.parameters` for how a rule is written down, `openai.answers`.
"""
