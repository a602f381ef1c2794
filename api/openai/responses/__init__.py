"""Responses without HTTP: bodies → parameters of chats, journals → typed events (docs/adr/020-responses.md).

May use: the modules of `openai`, `tasks.contract`. All of it is pure.
"""
