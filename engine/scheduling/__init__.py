"""Which sequences wait, which have slots, and what the next step decodes.

May use: `kvcache`, and what is above it. Pure: no llama.cpp, no clock, no threads.
"""
