"""The types of parameters and results of jobs, for type checkers."""
