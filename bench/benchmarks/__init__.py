"""The benchmarks, grouped by subject. Each is a module with `add_arguments`, and `run`, which returns a `Report`."""
