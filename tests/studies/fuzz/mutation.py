"""Mutate bytes, JSON and TOML documents, and command lines with a seed."""

import json
import random
import string
from typing import Any

import tomli_w

DEEP = 400
"""Nesting of a deep value, above every limit."""
NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**19)
HUGE = (10**400, -(10**400), 1e308, -1e308, 1e-320, float("nan"), float("inf"))
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "a" * 300,
        "9" * 5000,
        "\ud800",
        "\x1b[31m",
        "../../etc",
        "/dev/zero",
        "é" * 90,
    ),
    *(
        "layers.{0..99999999999}",
        "layers.{3..1}",
        "a.{0..3}.{0..3}",
        "*",
        "layers.*",
        "auto",
        "=1+1",
    ),
    *(
        "+9e99%",
        "+nan%",
        "38 XiB",
        "-1 GiB",
        "1e300 PiB",
        "2026-99-99",
        "<b>x</b>",
        "{}",
        "a.b" * 99,
    ),
)
TOKENS = (
    *(
        b"[" * DEEP,
        b"{" * DEEP,
        b'{"a":' * DEEP,
        b"]" * 9,
        b"\0",
        b"\xff\xfe",
        b"9" * 5000,
        b"1e999",
    ),
    *(
        b"a." * 200 + b"a = 1\n",
        b"[[units]]\n",
        b"[a" + b".a" * 200 + b"]\n",
        b"null",
        b"NaN",
        b'"',
    ),
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"PAR1", b"\x80" * 16, b"-", b"\\ud800", b"\n"),
)


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flip, remove or repeat some bytes, or replace them with a token."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.choice((1, 2, 4, 8, 64)))
        action = rng.randrange(5)
        if action == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            changed[at:end] = rng.randbytes(end - at)
        elif action == 2:
            del changed[at:end]
        elif action == 3:
            changed[at:at] = rng.choice(TOKENS)
        else:
            changed = changed[:at] if rng.random() < 0.2 else changed + changed[at:end]
    return bytes(changed)


def nasty_value(rng: random.Random) -> Any:
    """A value that is invalid in most places of the project's files."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice((None, True, False, [], {}, [[]], {"": {}}))
    if kind == 2:
        return rng.choice(HUGE)
    if kind == 3:
        return nested(rng.choice((5, 60, 70, DEEP)), is_table=rng.random() < 0.5)
    if kind == 4:
        return [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
    if kind == 5:
        return {rng.choice(TEXTS): rng.choice(NUMBERS)}
    return rng.choice(NUMBERS)


def nested(depth: int, *, is_table: bool) -> Any:
    """Nested lists or tables."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if is_table else [value]
    return value


def mutate_document(rng: random.Random, document: Any) -> Any:
    """A copy of plain values with changes at a few places."""
    copy = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(copy))
        if not places:
            break
        container, key = rng.choice(places)
        action = rng.randrange(6)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, list):
            container.extend([container[key]] * rng.choice((1, 9)))
        elif action == 2:
            other, its_key = rng.choice(places)
            container[key] = json.loads(json.dumps(other[its_key]))
        elif action == 3 and isinstance(container, dict):
            container[rng.choice(TEXTS)] = container[key]
        else:
            container[key] = nasty_value(rng)
    return copy


def json_input(rng: random.Random, content: bytes) -> bytes:
    """A mutated JSON file: mostly changed values, sometimes changed bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    document = json.loads(content)
    if isinstance(document, dict):
        document.pop("crc32", None)
    try:
        return json.dumps(mutate_document(rng, document)).encode()
    except RecursionError:  # json cannot write such deep values
        return mutate_bytes(rng, content)


def toml_input(rng: random.Random, content: bytes, fields: Any) -> bytes:
    """A mutated TOML file: mostly changed values, sometimes changed bytes."""
    if rng.random() < 0.5:
        try:
            return tomli_w.dumps(mutate_document(rng, fields)).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError, AttributeError):
            pass  # a value that TOML does not support
    return mutate_bytes(rng, content)


def word(rng: random.Random) -> str:
    """A word of a command line."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return str(rng.choice((*NUMBERS, *HUGE))) if rng.random() < 0.9 else "9" * 4000
    letters = string.printable if kind == 2 else "0123456789.,-+eGiBx%:/ "
    return "".join(rng.choice(letters) for _ in range(rng.randrange(12)))


def _places(value: Any) -> Any:
    """All places of a document: container and key."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            yield container, key
            if isinstance(item, dict | list):
                waiting.append(item)
