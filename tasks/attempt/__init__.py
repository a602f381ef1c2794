"""Run the attempts of jobs in a worker: start each attempt in the ledger, call its handler, and end it.

This package may import the engine, `worker`, `publishing` and the layers below them. Only workers import it.
"""
