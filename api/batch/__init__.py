"""Bulk runs: each line of a file becomes a job, and its result becomes a line of the output."""
