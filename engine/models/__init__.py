"""Resolve model sources, load models within a memory budget, and call and unload them by id.

This package may import `core`, `llama`, `memory`, and the packages that docs/architecture.md lists above them.
"""
