"""Convert messages to prompts, and tokens to the text, reasoning and tool calls of replies.

This package may import `errors` and `system`. The package does not depend on a model or on llama.cpp.
"""
