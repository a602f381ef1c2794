"""Bulk runs: a file of lines in, a file of results out (docs/batch.md)."""
