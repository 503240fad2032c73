"""Write and read the JSON files of a run: the manifest, ranks, network, memory and failures.

A record is written to a temporary file and renamed, so that a reader never sees half of it.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from fsdp_inspect.error_text import describe_validation_error
from fsdp_inspect.errors import CorruptFileError, SchemaVersionError
from fsdp_inspect.formatting import make_encodable
from fsdp_inspect.reading import InvalidTextError, parse_json
from fsdp_inspect.store.checksums import checksum_text
from fsdp_inspect.store.schema import RECORDS_FILE
from fsdp_inspect.trace.allocations import AllocationsRecord
from fsdp_inspect.trace.kernels import KernelRecord
from fsdp_inspect.trace.live_memory import LiveMemoryRecord, OutOfMemoryRecord
from fsdp_inspect.trace.network_probe import NetworkProbe
from fsdp_inspect.trace.records import SCHEMA_VERSION
from fsdp_inspect.trace.run import RankRecord, RunManifest, TableOrigin
from fsdp_inspect.writing import replace_file

AnyRecord = (
    RunManifest
    | RankRecord
    | NetworkProbe
    | LiveMemoryRecord
    | OutOfMemoryRecord
    | AllocationsRecord
    | KernelRecord
)
RecordT = TypeVar(
    "RecordT",
    RunManifest,
    RankRecord,
    NetworkProbe,
    LiveMemoryRecord,
    OutOfMemoryRecord,
    AllocationsRecord,
    KernelRecord,
)

_CHECKSUM_FIELD = re.compile(rb'"crc32"\s*:\s*"([0-9a-f]{8})"\s*\}\s*\Z')


def encode_record(record: AnyRecord) -> bytes:
    """Encode a record as JSON, with a checksum as the last field."""
    body = _dump(record).removesuffix("}").removesuffix("\n") + ",\n "
    return f'{body}"crc32": "{checksum_text(body)}"\n}}\n'.encode()


def _dump(record: AnyRecord) -> str:
    indent = None if isinstance(record, AllocationsRecord | KernelRecord) else 1
    try:
        return record.model_dump_json(indent=indent, fallback=str)
    except PydanticSerializationError:  # half of a surrogate pair, which UTF-8 cannot encode
        plain = record.model_dump(mode="json", fallback=str)
        return make_encodable(json.dumps(plain, indent=indent, ensure_ascii=False))


def decode_record(encoded: bytes, kind: type[RecordT], name: str) -> RecordT:
    """Read a record from JSON.

    Args:
        encoded: The file's bytes.
        kind: The class of the record.
        name: The file's name, for messages.

    Raises:
        SchemaVersionError: A newer version of FSDP Inspect wrote the file.
        CorruptFileError: The file is cut off, changed, or has another kind of record.
    """
    _check_integrity(encoded, name)
    fields = _fields_of(encoded, name)
    check_version(fields["schema_version"], name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise CorruptFileError(
            f"{name} is invalid: {describe_validation_error(error)} Expected a record of schema "
            f"version {SCHEMA_VERSION}. {_REMEDY}"
        ) from error


def check_version(version: object, name: str) -> None:
    """Reject files of a newer schema version.

    Raises:
        SchemaVersionError: This version does not support `version`.
        CorruptFileError: `version` is not a version.
    """
    if not isinstance(version, int):
        raise CorruptFileError(
            f"{name} has the invalid schema version {version!r:.40}. Expected a number up to "
            f"{SCHEMA_VERSION}. {_REMEDY}"
        )
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{name} has the unsupported schema version {version}. Expected a version up to "
            f"{SCHEMA_VERSION}. Update fsdp-inspect: pip install --upgrade fsdp-inspect."
        )


@dataclass(frozen=True, slots=True)
class ExpectedOrigin:
    """The origin that a file of a run must have."""

    origin: TableOrigin
    is_stated: bool
    """Whether the recorder of this version wrote the file, so that it states its origin."""

    @classmethod
    def of_record(cls, record: RankRecord | None) -> "ExpectedOrigin | None":
        """The origin of the tables of a rank; None: its record does not show it."""
        origin = None if record is None else record.origin
        return None if origin is None else cls(origin, is_stated=True)

    def check(self, stated: TableOrigin | None, name: str) -> None:
        """Reject a file of another run, attempt or rank.

        Args:
            stated: The origin in the file; None: it states none.
            name: The file's name, for messages.

        Raises:
            CorruptFileError: The file has another origin, or states none where it must.
        """
        if stated == self.origin or (stated is None and not self.is_stated):
            return
        found = "does not state its recording" if stated is None else f"belongs to {stated}"
        raise CorruptFileError(
            f"{name} {found}. Expected {self.origin}. The file is ignored. {_REMEDY}"
        )


_REMEDY = "Copy the file again from where it was recorded."


def _fields_of(encoded: bytes, name: str) -> dict[str, Any]:
    try:
        fields = parse_json(encoded)
    except InvalidTextError as error:
        raise CorruptFileError(
            f"{name} ({len(encoded)} bytes) cannot be parsed: {error}. Expected the record of a "
            f"run as UTF-8 JSON. {_REMEDY}"
        ) from error
    if not isinstance(fields, dict) or "schema_version" not in fields:
        raise CorruptFileError(
            f"{name} is JSON without a schema_version. Expected a record written by "
            f"fsdp-inspect. {_REMEDY}"
        )
    return fields


def _check_integrity(encoded: bytes, name: str) -> None:
    found = _CHECKSUM_FIELD.search(encoded)
    if found is None:
        return
    actual = zlib.crc32(encoded[: found.start()])
    if int(found[1], 16) != actual:
        raise CorruptFileError(
            f"{name} has the checksum {actual:08x}. Expected {found[1].decode()}, as its crc32 "
            "field states: the file has changed since it was written. Copy the file again from "
            "where it was recorded; if you edited it by hand, remove its crc32 field."
        )


# --- Join the records of all ranks of a run in one file, so that an object store needs one request.
#
# A record counts only if the object store lists its own file with the same MD5 (the ETag in S3). A
# record that changed later is therefore read from its own file.

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
