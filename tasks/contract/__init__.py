"""The contract between producers, workers and readers: payloads, results, events, errors and keys.

You can import this package without llama.cpp.
"""
