"""Bulk runs from file to file."""
