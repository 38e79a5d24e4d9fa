"""
Decide what is a secret, and hide it. Nothing else decides it: what leaves the process is passed through here.

Secret are the values of variables, headers, arguments, addresses and key files of a configuration that their name or their
place gives away, and, in what is shown or published, every text with the form of a known kind of token.
"""

import base64
import binascii
import json
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from mcp_grpo.inert import inert


MIN_LENGTH = 8  # shorter values ("1", "true", "INFO") are not secrets, and hiding them would garble messages
MIN_TOKEN_LENGTH = 4  # of what a name calls a secret, if it is no word: "a1b2"; it is hidden where it stands alone
MIN_PIN_LENGTH = 6  # of one that is a number
MAX_FILE_BYTES = 1 << 16  # of a file that is read for the secret in it
HIDDEN = "***"

_SECRET_NAME = re.compile(
    "key|token|secret|pass|pwd|auth(?!or(?!i[sz]))|cred|cookie|private|dsn|jwt|bearer|webhook|signature|"
    "conn(?:ection)?_?str|"
    r"(?<![a-z])(?:pat|pin|otp|sas|sig|salt|cert|pem|session_?id)s?(?![a-z])",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile("(?<=[a-z0-9])(?=[A-Z])")
_COUNT_NAME = re.compile("tokens([_-]|$)", re.IGNORECASE)  # "--max-tokens 512"
_PLAIN_VALUE = re.compile("true|false|<[^<>]*>", re.IGNORECASE)  # "--private true", "--eos_token <|im_end|>"
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_PLAIN_HEADER = re.compile("accept|content-|mcp-|user-agent", re.IGNORECASE)
_HEADER = re.compile(r"\s*([A-Za-z][\w-]*)\s*:\s*(\S.*)", re.DOTALL)
_HEADER_FLAG = re.compile("-H|--?headers?", re.IGNORECASE)
_ASSIGNED = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_CODE = re.compile(
    r"rev|commit|sha|hash|digest|checksum|uuid|model|image|version", re.IGNORECASE
)  # "--revision 3f2c..."
_RUN = re.compile(r"[A-Za-z0-9]{16,}")  # of letters and digits, as no word is
_SEGMENT = re.compile(r"[A-Za-z0-9_~.-]{12,}")  # of an address

# Kinds of tokens that are known by their form. Each is found in time that grows with the text only.
_FORMS = re.compile(
    "|".join(
        (
            r"gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
            r"hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|tvly-[\w-]{16,}",
            r"xox[a-z]-[\w-]{10,}|xapp-[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}|whsec_\w{16,}",
            r"(?<![A-Za-z0-9])sk-(?=[\w-]{0,40}\d)[\w-]{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}",
            r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
            r"(?<![\w-])eyJ[\w-]{5,}\.eyJ[\w-]{5,}\.[\w-]+",
            r"(?<=hooks\.slack\.com/)[a-z]+/[\w/-]{8,}|(?<=/api/webhooks/)\d+/[\w-]{8,}|(?<=webhook\.office\.com/)[^\s\"'<>]{8,}",
            r"(?<=://)[^/\s:@\"'<>]*:[^/\s@\"'<>]+(?=@)",
            r"(?<=[Bb]earer )[\w.~+/-]{8,}=*|(?<=[Bb]asic )[A-Za-z0-9+/]{8,}=*",
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s\\:,]*(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?",
        )
    )
)

# In the schema of a tool: names that a call is made by, which must stay as they are.
_NAMES_IN_SCHEMAS = ("type", "required", "dependentRequired", "$ref", "$id", "$anchor", "$schema", "format", "name")

Variables = Iterable[tuple[str, str]]


def private_values(
    variables: Variables, headers: Mapping[str, str], args: Sequence[str] = (), url: str = ""
) -> tuple[str, ...]:
    """Return all values that may be private, to be hidden in logs and errors."""
    variables = [*variables, *parse_qsl(_split(url).query)]
    values = [*(value for _, value in variables), *_parts(headers.values())]
    values = [value for value in values if len(value) >= MIN_LENGTH]
    return _hideable([*values, *_secrets(variables, headers, args, url)])


def secret_values(
    variables: Variables, headers: Mapping[str, str], args: Sequence[str] = (), url: str = ""
) -> tuple[str, ...]:
    """Return the values that are likely secrets, by their name, their place or their form."""
    return _hideable(_secrets([*variables, *parse_qsl(_split(url).query)], headers, args, url))


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable suggests a secret."""
    return _SECRET_NAME.search(_CAMEL_CASE.sub("_", name)) is not None


def hidden(values: tuple[str, ...], value: Any) -> Any:
    """Replace values by `***` in a text, or in the texts of a JSON value."""
    if not values:
        return value
    if isinstance(value, str):
        for secret in values:
            if secret in value:
                value = _replaced(value, secret)
    elif isinstance(value, Mapping):
        return {hidden(values, k): hidden(values, v) for k, v in cast("Mapping[Any, Any]", value).items()}
    elif isinstance(value, list):
        return [hidden(values, item) for item in cast("list[Any]", value)]
    return value


def without_tokens(text: str) -> str:
    """Replace what has the form of a known kind of token by `***`, whoever it belongs to."""
    return _FORMS.sub(HIDDEN, text)


def shown_error(error: BaseException, values: tuple[str, ...] = ()) -> str:
    """Return an error with its traceback, as it may be logged: without these values and tokens, and inert."""
    return inert(without_tokens(hidden(values, "".join(traceback.format_exception(error)).rstrip())))


def described_without_secrets(values: tuple[str, ...], value: Any) -> Any:
    """Hide secrets in what a server says about a tool; names that calls are made by stay as they are."""
    if isinstance(value, str):
        return without_tokens(hidden(values, value))
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value).items()
        return {
            k: v if k in _NAMES_IN_SCHEMAS and not isinstance(v, Mapping) else described_without_secrets(values, v)
            for k, v in entries
        }
    if isinstance(value, list):
        return [described_without_secrets(values, item) for item in cast("list[Any]", value)]
    return value


def without_secrets(args: Sequence[str]) -> list[str]:
    """Replace the secrets in a command line by `***`."""
    shown = list(args)
    for place, _, secret in _in_arguments(args):
        shown[place] = shown[place].replace(secret, HIDDEN)
    return [without_tokens(arg) for arg in shown]


def shown_address(url: str) -> str:
    """Return an address without user, password, query and the tokens in its path."""
    parts = _split(url)
    path = parts.path
    for token in _path_tokens(url):
        path = path.replace(token, HIDDEN)
    return without_tokens(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}")


def _secrets(variables: Variables, headers: Mapping[str, str], args: Sequence[str], url: str) -> list[str]:
    found = _parts(value for name, value in headers.items() if not _PLAIN_HEADER.match(name))
    parts = _split(url)
    named = [*variables, *((name, secret) for _, name, secret in _in_arguments(args))]
    for name, value in named:
        passwords = _PASSWORD.findall(value)
        if passwords or _is_secret(name, value) or _FORMS.search(value):
            found += [value, *passwords, *_FORMS.findall(value), *_of_address(value), *_of_file(value)]
    if parts.username is not None:
        found += [part for part in (parts.password or parts.username,) if part]
    return [*found, *_path_tokens(url)]


def _in_arguments(args: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the secrets in a command line: where each is, what it is called, and the text itself."""
    for place, (before, arg) in enumerate(zip(["", *args], args, strict=False)):
        assigned = _ASSIGNED.fullmatch(arg)
        header = _HEADER.fullmatch(assigned[2] if assigned and _HEADER_FLAG.fullmatch(assigned[1]) else arg)
        is_value_of = before if before.startswith("-") and "=" not in before and not arg.startswith("-") else ""
        if assigned and _is_secret(assigned[1], assigned[2]):
            yield place, assigned[1], assigned[2]
        elif header and not _PLAIN_HEADER.match(header[1]) and (is_header(before, arg) or is_secret_name(header[1])):
            yield place, "key", header[2]
            yield from ((place, "key", part) for part in [header[2].partition(" ")[2]] if part)
        elif is_value_of and not assigned and _is_secret(before, arg):
            yield place, before, arg
        elif _looks_like_token(arg) and not _CODE.search(before):
            yield place, "token", arg
        yield from ((place, "password", password) for password in _PASSWORD.findall(arg))
        yield from ((place, "token", token) for token in _path_tokens(arg) if "://" in arg)


def is_header(before: str, arg: str) -> bool:
    """Return whether an argument is a header: `-H "X-Tenant: ann"` or `--header=X-Tenant: ann`."""
    return _HEADER_FLAG.fullmatch(before) is not None or _HEADER_FLAG.fullmatch(arg.partition("=")[0]) is not None


def _is_secret(flag: str, value: str) -> bool:
    if not value or not is_secret_name(flag) or _PLAIN_VALUE.fullmatch(value):
        return False
    return not (_COUNT_NAME.search(flag) and value.isascii() and value.isdecimal())


def _looks_like_token(text: str) -> bool:
    """Return whether an argument that nothing names is a token: long, and of letters and digits without a pattern."""
    if _FORMS.fullmatch(text):
        return True
    if any(mark in text for mark in "/@:= ") or os.path.exists(text):  # paths, packages, images
        return False
    return any(_is_random(run) for run in _RUN.findall(text))


def _path_tokens(url: str) -> list[str]:
    """Return the parts of an address's path that are tokens, not words."""
    return [part for part in _split(url).path.split("/") if _SEGMENT.fullmatch(part) and _is_random(part)]


def _is_random(text: str) -> bool:
    """Return whether lower case, upper case and digits change as often as in no word, name or version."""
    pairs = [(a, b) for a, b in pairwise(text) if a.isalnum() and b.isalnum()]
    num_changes = sum(_kind_of(a) != _kind_of(b) for a, b in pairs)
    return num_changes * (4 if any(map(str.isdecimal, text)) else 2) >= len(text)


def _kind_of(character: str) -> int:
    return character.isdecimal() + 2 * character.isupper()


def _of_address(value: str) -> list[str]:
    """Return the path and the last part of a secret address: a server may well print only these."""
    path = _split(value).path.strip("/") if "://" in value else ""
    return [path, path.rpartition("/")[2]] if path else []


def _of_file(value: str) -> list[str]:
    """Return the secrets in a file that a secret variable names: its text, or the secret values in its JSON or `NAME=value`."""
    try:
        path = Path(value)
        if not path.is_file() or not 0 < path.stat().st_size <= MAX_FILE_BYTES:
            return []
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    if text.startswith("#!"):  # a program that gives the secret, not a file with it
        return []
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        pairs = [line.partition("=") for line in text.splitlines()]
        named = [(name.strip(), value.strip().strip("'\"")) for name, is_assigned, value in pairs if is_assigned]
    else:
        entries = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        named = [(name, value) for name, value in entries.items() if isinstance(value, str)]
    return [text, *(value for name, value in named if is_secret_name(name))]


def _parts(headers: Iterable[str]) -> list[str]:
    # "Bearer abc" is a header, but the server may well print "abc" alone; "Basic" has a password in it.
    found: list[str] = []
    for value in headers:
        kind, _, rest = value.partition(" ")
        found += [value, rest]
        if kind.lower() == "basic":
            try:
                found.append(base64.b64decode(rest, validate=True).decode().partition(":")[2])
            except (binascii.Error, ValueError):
                continue
    return found


def _hideable(values: Iterable[str]) -> tuple[str, ...]:
    """Drop words and paths, add how JSON and addresses write the rest; longest first, since one may contain another."""
    kept = {value for value in values if _can_be_hidden(value) and not os.path.exists(value)}
    spelt = {json.dumps(value)[1:-1] for value in kept} | {quote(value, safe="", errors="replace") for value in kept}
    spelt |= {unquote(value) for value in kept}
    return tuple(sorted(kept | {value for value in spelt if _can_be_hidden(value)}, key=len, reverse=True))


def _can_be_hidden(value: str) -> bool:
    if len(value) >= MIN_LENGTH:
        return True
    # A short one must not be a word or a number, which would be hidden wherever they mean something else.
    is_word = value.isalpha() or (value.isdecimal() and len(value) < MIN_PIN_LENGTH)
    return len(value) >= MIN_TOKEN_LENGTH and not is_word


def _replaced(text: str, secret: str) -> str:
    if len(secret) >= MIN_LENGTH:
        return text.replace(secret, HIDDEN)
    return re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)


def _split(url: str) -> Any:
    try:
        parts = urlsplit(url)
        _ = parts.username
    except ValueError:
        return urlsplit("")
    return parts
