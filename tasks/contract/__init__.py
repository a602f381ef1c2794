"""The contract between producers, workers and readers: payloads, results, events, errors and keys.

It can be imported without llama.cpp.
"""
