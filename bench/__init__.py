"""The project's workloads, benchmarks and model writers."""
