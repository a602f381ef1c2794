"""Run the attempts of jobs in a worker: start each attempt in the ledger, call its handler, and end it.

This package may use `worker`, `publishing` and lower layers, and the engine. Only workers import this package.
"""
