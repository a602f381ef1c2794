"""The benchmarks, grouped by subject. Each module has `add_arguments`, and `run`, which returns a `Report`."""
