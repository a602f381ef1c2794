"""What users can measure with their own model: callers at once, mixed lengths, arrivals, bulk runs, the gateway.

This folder alone is in the wheel, beside the harness.
"""
