"""Derive the markup of a model's replies from conversations that its chat template renders.

This package may import `formats`.
"""
