"""Read files and parse JSON and TOML within limits of size, depth and integers.

Files come from other machines and from users, so all of them are untrusted. A pipe or a device
never ends, nesting exhausts the stack, and an integer of 400 digits overflows in the first
division. All code that reads a whole file or parses JSON or TOML uses these functions.
"""

import errno
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

MAX_JSON_BYTES = 16 << 20
MAX_TOML_BYTES = 1 << 20
MAX_DEPTH = 64
"""Levels of nested lists and tables."""
MAX_KEY_PARTS = 64
"""Parts of a dotted TOML key. tomllib needs quadratic time for more."""

_INT64 = range(-(2**63), 2**63)
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_NUMBER = re.compile(rb"9[0-9]{18}|[0-9]{20}")
"""Occurs in each integer of more than 64 bits, and not in times until the year 2255."""
_LONG_KEY = re.compile(
    rf"(?<![\w.\"'-]){_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{MAX_KEY_PARTS}}}"
)


class InvalidTextError(ValueError):
    """A text is not valid JSON or TOML, or exceeds a limit.

    The message states what is wrong and, for a limit, what is expected. It has no full stop, so
    that the caller can put it into a sentence with the file's name and the remedy.
    """


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. A pipe would block, and a device has no end.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return file


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"File too large. Expected at most {max_bytes:,} bytes")
        return file.read(size)  # `read(limit)` would allocate gigabytes first


def parse_json(encoded: bytes | str) -> Any:
    """Parse JSON.

    Integers outside of 64 bits become floats. Fields that need an integer then reject them, and
    free-form settings, such as a seed, keep a value.

    Raises:
        InvalidTextError: The text is not JSON, or exceeds a limit.
    """
    _check_size(encoded, MAX_JSON_BYTES)
    try:
        value = from_json(encoded)
    except ValueError as error:
        raise InvalidTextError(f"invalid JSON: {error}") from error
    return value if _is_within_limits(encoded) else _limited(value)


def _is_within_limits(encoded: bytes | str) -> bool:
    """Whether a JSON text certainly has no long integer and no deep nesting; a fast check."""
    text = encoded.encode(errors="replace") if isinstance(encoded, str) else encoded
    brackets = text.count(b"[") + text.count(b"{")
    return brackets <= MAX_DEPTH and _LONG_NUMBER.search(text) is None


def parse_toml(encoded: bytes | str) -> dict[str, Any]:
    """Parse TOML; integers are treated as in `parse_json`.

    Raises:
        InvalidTextError: The text is not TOML, or exceeds a limit.
    """
    _check_size(encoded, MAX_TOML_BYTES)
    try:
        text = encoded if isinstance(encoded, str) else encoded.decode()
        if _LONG_KEY.search(text):
            raise InvalidTextError(
                f"a key has more than {MAX_KEY_PARTS} parts. Expected at most {MAX_KEY_PARTS}"
            )
        fields: dict[str, Any] = _limited(tomllib.loads(text))
    except InvalidTextError:
        raise
    except ValueError as error:
        raise InvalidTextError(f"invalid TOML: {error}") from error
    except RecursionError as error:
        raise InvalidTextError(_too_deep()) from error
    return fields


def _open_at_once(name: str, flags: int) -> int:
    """Open a file. Opening a pipe does not wait for its other end."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _check_size(encoded: bytes | str, max_bytes: int) -> None:
    if len(encoded) > max_bytes:
        raise InvalidTextError(
            f"the text has {len(encoded):,} bytes. Expected at most {max_bytes:,}"
        )


def _limited(value: Any) -> Any:
    """The value with integers of at most 64 bits, after a check of its depth."""
    top = [value]
    containers: list[tuple[int, Any]] = [(0, top)]
    while containers:
        depth, container = containers.pop()
        if depth > MAX_DEPTH:
            raise InvalidTextError(_too_deep())
        is_table = isinstance(container, dict)
        for place, item in container.items() if is_table else enumerate(container):
            if isinstance(item, dict | list):
                containers.append((depth + 1, item))
            elif type(item) is int and item not in _INT64:
                container[place] = _as_float(item)
    return top[0]


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError as error:
        raise InvalidTextError(
            "an integer has more than 308 digits. Expected at most 64 bits"
        ) from error


def _too_deep() -> str:
    return f"lists and tables are nested more than {MAX_DEPTH} levels deep"
