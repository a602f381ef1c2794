"""What benchmarks share: the engine or the service under test, workloads, reports, all in turn.

May use: `models`.
"""
