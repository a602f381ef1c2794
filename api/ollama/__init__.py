"""Convert Ollama request bodies into job parameters, and results and events into Ollama answers, independently of HTTP.

This package may import `tasks.contract`, and the parts of `openai` and `anthropic` that the formats have in common.
"""
