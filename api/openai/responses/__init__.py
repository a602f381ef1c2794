"""Convert OpenAI's response requests into chat parameters, and journals into events (docs/adr/020-responses.md).

This package may import `tasks.contract` and the modules in `openai`. This package does not use HTTP, and all of its
functions are pure.
"""
