"""OpenAI's responses without HTTP: bodies to parameters of chats, journals to typed events (docs/adr/020-responses.md).

This package may use the modules of `openai`, and `tasks.contract`. All functions are pure.
"""
