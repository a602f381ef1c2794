"""Define patterns for the keyword `format`, in a regex subset that Python, JavaScript and common validators accept."""

from __future__ import annotations

_DAY = (
    "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_SIZE = "(?:0|[1-9][0-9]{0,3})"
_SECONDS = rf"{_SIZE}S"
_MINUTES = rf"{_SIZE}M(?:{_SECONDS})?"
_HOURS = rf"{_SIZE}H(?:{_MINUTES})?"
_TIME_OF_DURATION = rf"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"
_DAYS = rf"{_SIZE}D"
_MONTHS = rf"{_SIZE}M(?:{_DAYS})?"
_YEARS = rf"{_SIZE}Y(?:{_MONTHS})?"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_HEX = "[0-9a-fA-F]"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"  # shorter than the limit of 253 characters
_URL_CHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_WORD = "[A-Za-z0-9_+-]"

FORMATS: dict[str, str] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DAY,
        "time": _TIME,
        "date-time": rf"{_DAY}T{_TIME}",
        "duration": rf"P(?:(?:{_YEARS}|{_MONTHS}|{_DAYS})(?:{_TIME_OF_DURATION})?|{_TIME_OF_DURATION}|{_SIZE}W)",
        "email": rf"{_WORD}{{1,20}}(?:\.{_WORD}{{1,20}}){{0,2}}@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,20}}",
        "hostname": _HOST,
        "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
        "ipv6": rf"(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,3}}(?::{_GROUP}){{1,3}}"
        rf"|::(?:{_GROUP}(?::{_GROUP}){{0,6}})?|(?:{_GROUP}:){{1,7}}:",
        "uuid": rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
        "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{1,20}}://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_URL_CHAR}*)*"
        rf"(?:\?(?:{_URL_CHAR}|[/?])*)?(?:#(?:{_URL_CHAR}|[/?])*)?",
    }.items()
}

# Patterns from Zod 4 that llguidance can't compile, but that every value of the format matches.
IMPLIED = frozenset(
    {
        (
            "email",
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        ),
        (
            "duration",
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        ),
    }
)


def portable(pattern: str) -> str:
    """Return a pattern that llguidance interprets as ECMA-262 interprets the given pattern.

    ECMA-262 does not support nested classes or operators within classes.
    """
    parts, at, in_class = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            parts.append(pattern[at : at + 2])
            at += 2
            continue
        if in_class and char in "[&~":
            parts.append("\\")
        elif char == "[":
            in_class = True
        elif char == "]":
            in_class = False
        parts.append(char)
        at += 1
    return "".join(parts)
