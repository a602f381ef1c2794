"""Scheduling: decide which sequences wait, which have slots, and which tokens the next step computes.

This package may import `kvcache`, and the packages that docs/architecture.md lists above `kvcache`. The package
doesn't use llama.cpp, clocks or threads.
"""
