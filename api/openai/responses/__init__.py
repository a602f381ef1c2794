"""Convert bodies of OpenAI's responses into chat parameters, and journals into events (docs/adr/020-responses.md).

This package may use the modules of `openai`, and `tasks.contract`. It does not use HTTP, and all of its functions are
pure.
"""
