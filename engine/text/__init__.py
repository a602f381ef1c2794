"""Convert messages to prompts, and tokens to the text, reasoning and tool calls of replies.

May use: `errors`, `system`. This package does not depend on a model or on llama.cpp.
"""
