"""Join the records of all ranks of a run in one file, so that an object store needs one request.

A record counts only if the object store lists its own file with the same MD5 (the ETag in S3). A
record that changed later is therefore read from its own file.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_inspect.reading import InvalidTextError, parse_json
from fsdp_inspect.store.records import replace_file
from fsdp_inspect.store.schema import RECORDS_FILE

LEAST_RECORDS = 32
"""A run with fewer ranks has no such file: as many requests are sent at once."""
_MAX_BYTES = 256 << 20


def write_record_bundle(path: Path, names: Sequence[str]) -> None:
    """Write the records of a run with many ranks.

    Args:
        path: The run folder.
        names: The records, by their paths in the run.

    Raises:
        OSError: Writing failed.
    """
    if len(names) < LEAST_RECORDS:
        return
    texts = {
        name: (path / name).read_bytes().decode(errors="replace")
        for name in names
        if (path / name).is_file()
    }
    encoded = gzip.compress(json.dumps(texts).encode(), mtime=0)
    file = path / RECORDS_FILE
    if not file.exists() or file.read_bytes() != encoded:
        replace_file(file, encoded)


def read_record_bundle(encoded: bytes | None) -> Mapping[str, bytes]:
    """The records by their paths in the run; empty if the file is missing or damaged."""
    try:
        reader = zlib.decompressobj(wbits=31)
        found = parse_json(reader.decompress(encoded or b"", _MAX_BYTES))
    except (zlib.error, InvalidTextError):
        return {}
    texts = found.items() if isinstance(found, dict) else ()
    return {name: text.encode() for name, text in texts if isinstance(text, str)}


def has_tag(content: bytes, tag: str) -> bool:
    """Whether an object with this ETag has this content."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest() == tag.strip('"')
