"""Scheduling: decide which sequences wait, which have slots, and which tokens the next step computes.

May use: `kvcache`, and the packages above it. This package doesn't use llama.cpp, clocks or threads.
"""
