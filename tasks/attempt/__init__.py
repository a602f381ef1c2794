"""Run attempts at jobs in a worker: start each attempt in the ledger, call the job's handler, and end the attempt.

This package may import the engine, `worker`, `publishing` and the layers below them. Only workers import this package.
"""
