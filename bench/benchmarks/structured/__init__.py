"""Structured output: what schemas cost, whether texts conform to them, and what clients of other projects get."""
