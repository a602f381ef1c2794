"""The benchmarks, grouped by subject. Each module defines `add_arguments` and `run`, which returns a `Report`."""
