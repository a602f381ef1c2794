"""What a state on disk is worth: the time to compute it against the time to read it, both as measured. Pure."""

from __future__ import annotations

OPEN_S = 0.001  # to find, open and hand over a file, beside its bytes
MARGIN = 1.25  # reading has to be clearly faster: both rates are means


def saved_s(num_tokens: int, num_bytes: int, prefill_tokens_per_s: float, read_bytes_per_s: float) -> float:
    """Seconds that reading a file saves over computing the tokens; below 0 where computing is faster.

    A rate of 0 is one that is not known: then it is read, or computed, in no time.
    """
    compute_s = num_tokens / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0
    return compute_s - MARGIN * read_s(num_bytes, read_bytes_per_s)


def read_s(num_bytes: int, read_bytes_per_s: float) -> float:
    """Seconds until a file is read and verified."""
    return OPEN_S + (num_bytes / read_bytes_per_s if read_bytes_per_s > 0 else 0.0)


def worth_s(
    num_tokens: int, num_bytes: int, prefill_tokens_per_s: float, read_bytes_per_s: float, probability: float
) -> float:
    """What writing it may be expected to save, in seconds; 0 for what is not worth reading again."""
    return max(0.0, saved_s(num_tokens, num_bytes, prefill_tokens_per_s, read_bytes_per_s)) * probability


def longest_wait_s(num_more_tokens: int, prefill_tokens_per_s: float) -> float:
    """How long a request waits for such a file at most: as long as computing the tokens would take."""
    return num_more_tokens / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0
