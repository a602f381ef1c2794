"""Bulk runs, in which each line of a file becomes a job, and each job's result becomes a line of the output."""
