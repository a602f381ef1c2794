"""The benchmarks, by what they measure. Each is a module with `add_arguments` and `run`, which gives a `Report`."""
