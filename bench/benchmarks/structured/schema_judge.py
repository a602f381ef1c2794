"""Check whether JSON conforms to a schema, with the `jsonschema` library (draft 2020-12, formats, exact decimals).

Numbers are parsed as decimals, because doubles would fail for correctly written multiples of 0.01.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import referencing.exceptions

_LABELS = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_URI_CHARS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")
_DATE_PARTS, _TIME_PARTS = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)", r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DURATION = re.compile(rf"P({_DATE_PARTS}({_TIME_PARTS})?|{_TIME_PARTS}|\d+W)", re.ASCII)  # RFC 3339, appendix A
FORMATS = jsonschema.FormatChecker(())


class Unjudgeable(Exception):
    """jsonschema can't evaluate the schema, for example because Python does not support a pattern."""


class SchemaJudge:
    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        """Create a judge, which checks formats unless the schema contains patterns.

        If a schema's pattern and format can't both be enforced, cellama enforces only the pattern.
        """
        text = json.dumps(schema)
        formats = None if '"pattern"' in text else FORMATS
        self._validator = jsonschema.Draft202012Validator(exact(text), format_checker=formats)

    def problem(self, text: str) -> str | None:
        """Return the reason why a JSON text does not conform, or None if it conforms.

        Raises ValueError if the text is not valid JSON, and Unjudgeable if jsonschema can't validate it.
        """
        value = exact(text)
        try:
            error = next(self._validator.iter_errors(value), None)
        except (re.error, RecursionError, referencing.exceptions.Unresolvable) as problem:
            raise Unjudgeable(str(problem)) from None
        return None if error is None else f"{error.json_path}: {error.message}"


def exact(text: str) -> Any:
    """Parse JSON with integers as `int` and other numbers as `Decimal`."""
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _number(text: str) -> Decimal | int:
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _date(value: str) -> bool:
    return len(value) == 10 and bool(datetime.date.fromisoformat(value))


def _time(value: str) -> bool:
    return datetime.time.fromisoformat(value).tzinfo is not None


def _date_time(value: str) -> bool:
    return value[10:11] == "T" and datetime.datetime.fromisoformat(value).tzinfo is not None


def _email(value: str) -> bool:
    local, _, host = value.rpartition("@")
    return 0 < len(local) <= 64 and not re.search(r"\s|@|\.\.|^\.|\.$", local) and _hostname(host)


def _hostname(value: str) -> bool:
    return len(value) <= 253 and bool(_LABELS.fullmatch(value))


def _uri(value: str) -> bool:
    parts = urlsplit(value)
    return bool(parts.scheme and _URI_CHARS.fullmatch(value) and (parts.port is None or parts.port > 0))


_CHECKS: dict[str, Callable[[str], bool]] = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": lambda value: bool(_DURATION.fullmatch(value)),
    "email": _email,
    "hostname": _hostname,
    "ipv4": lambda value: bool(ipaddress.IPv4Address(value).packed),
    "ipv6": lambda value: bool(ipaddress.IPv6Address(value).packed),
    "uuid": lambda value: str(uuid.UUID(value)) == value.lower(),
    "uri": _uri,
}


def _of_texts(check: Callable[[str], bool], value: Any) -> bool:
    return not isinstance(value, str) or check(value)


for _name, _check in _CHECKS.items():
    FORMATS.checks(_name, ValueError)(functools.partial(_of_texts, _check))
