"""Which values of a configuration must not be shown, and how they are hidden."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit


MIN_LENGTH = 8  # shorter values ("1", "true", "INFO") are not secrets, and hiding them would garble messages

_SECRET_NAME = re.compile("key|token|secret|pass|pwd|auth(?!or(?!i[sz]))|cred|cookie|private|dsn", re.IGNORECASE)
_COUNT_NAME = re.compile("tokens([_-]|$)", re.IGNORECASE)  # "--max-tokens 512"
_PLAIN_VALUE = re.compile("true|false|<[^<>]*>", re.IGNORECASE)  # "--private true", "--eos_token <|im_end|>"
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_PLAIN_HEADER = re.compile("accept|content-|mcp-|user-agent", re.IGNORECASE)

Variables = Iterable[tuple[str, str]]


def private_values(variables: Variables, headers: Mapping[str, str]) -> tuple[str, ...]:
    """
    All that somebody may want to keep to themselves, for logs and errors.

    Args:
        variables (`Iterable[tuple[str, str]]`):
            Names and values.
        headers (`Mapping[str, str]`):
            HTTP headers.

    Returns:
        `tuple[str, ...]`: What [`hidden`] is to hide. Short values and existing paths are no secrets.
    """
    return _hideable([*(value for _, value in variables), *_parts(headers.values())])


def secret_values(variables: Variables, headers: Mapping[str, str]) -> tuple[str, ...]:
    """
    What is probably a secret, for texts that must not lose an ordinary word.

    Args:
        variables (`Iterable[tuple[str, str]]`):
            Names and values. A secret has a name that speaks of one, or holds a password (`://user:password@`).
        headers (`Mapping[str, str]`):
            HTTP headers. All are secrets but those about formats and programs.

    Returns:
        `tuple[str, ...]`: What [`hidden`] is to hide.
    """
    found = _parts(value for name, value in headers.items() if not _PLAIN_HEADER.match(name))
    for name, value in variables:
        passwords = _PASSWORD.findall(value)
        if passwords or is_secret_name(name):
            found += [value, *passwords]
    return _hideable(found)


def is_secret_name(name: str) -> bool:
    """
    Tell whether the name of a variable speaks of a secret.

    Args:
        name (`str`):
            The name.

    Returns:
        `bool`: Whether its value is to be kept out of sight.
    """
    return _SECRET_NAME.search(name) is not None


def hidden(values: tuple[str, ...], value: Any) -> Any:
    """
    Put `***` in the place of values.

    Args:
        values (`tuple[str, ...]`):
            From [`private_values`] or [`secret_values`].
        value (`Any`):
            A text, or JSON with texts in it.

    Returns:
        `Any`: The same, without them.
    """
    if not values:
        return value
    if isinstance(value, str):
        for secret in values:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {hidden(values, k): hidden(values, v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [hidden(values, item) for item in cast("list[Any]", value)]
    return value


def url_values(url: str) -> list[tuple[str, str]]:
    """
    What an address holds beside the place it leads to.

    Args:
        url (`str`):
            The address.

    Returns:
        `list[tuple[str, str]]`: Names and values of its query, and its password.
    """
    parts = urlsplit(url)
    return [*parse_qsl(parts.query), *([("password", parts.password)] if parts.password else [])]


def without_secrets(args: Sequence[str]) -> list[str]:
    """
    A command's arguments, fit to be shown.

    Args:
        args (`Sequence[str]`):
            The arguments.

    Returns:
        `list[str]`: The same, with `***` for the value of a flag whose name speaks of a secret (`--api-key abc`). A number of
        tokens is none.
    """
    shown: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        flag, is_assigned, value = arg.partition("=")
        if is_assigned and flag.startswith("-") and _is_secret(flag, value):
            shown.append(f"{flag}=***")
        elif before.startswith("-") and "=" not in before and not arg.startswith("-") and _is_secret(before, arg):
            shown.append("***")
        else:
            shown.append(arg)
    return shown


def _is_secret(flag: str, value: str) -> bool:
    if not _SECRET_NAME.search(flag) or _PLAIN_VALUE.fullmatch(value):
        return False
    is_count = _COUNT_NAME.search(flag) and value.isascii() and value.isdecimal()
    return not is_count


def _parts(headers: Iterable[str]) -> list[str]:
    # "Bearer abc" is a header, but the server may well print "abc" alone.
    return [part for value in headers for part in (value, value.partition(" ")[2])]


def _hideable(values: Iterable[str]) -> tuple[str, ...]:
    """Those worth hiding, also as JSON writes them; the longest first, since one may be a part of another."""
    kept = {value for value in values if len(value) >= MIN_LENGTH and not os.path.exists(value)}
    return tuple(sorted(kept | {json.dumps(value)[1:-1] for value in kept}, key=len, reverse=True))
