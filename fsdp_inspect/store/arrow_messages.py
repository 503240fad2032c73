"""Read the decoded size of an Arrow record batch before it is decoded.

pyarrow does not give the uncompressed sizes of a message, so this module reads them from the
FlatBuffers header (Message.fbs of the Arrow format) and from the body.
"""

import struct

import pyarrow as pa

_HEADER_FIELD = 2
"""`Message.header`, here a RecordBatch."""
_BUFFERS_FIELD, _COMPRESSION_FIELD = 2, 3
"""Fields of RecordBatch."""
_BUFFER = struct.Struct("<qq")
"""Offset and length of a buffer in the body."""


def decoded_bytes_of(raw: bytes, position: int) -> int:
    """Bytes to which the record batch message at a position decodes; 0 if it is another message.

    A compressed buffer begins with its uncompressed length. The decoder allocates that much, so a
    wrong length is found here too.
    """
    try:
        message = pa.ipc.read_message(pa.py_buffer(raw).slice(position))
        if message.type != "record batch" or message.body is None:
            return 0
        return _decoded(memoryview(message.metadata), memoryview(message.body))
    except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError, struct.error):
        return 0


def _decoded(header: memoryview, body: memoryview) -> int:
    (root,) = struct.unpack_from("<I", header)
    batch = _follow(header, _field(header, root, _HEADER_FIELD))
    if not _field(header, batch, _COMPRESSION_FIELD):
        return len(body)
    buffers = _follow(header, _field(header, batch, _BUFFERS_FIELD))
    (count,) = struct.unpack_from("<I", header, buffers)
    decoded = 0
    for number in range(count):
        offset, length = _BUFFER.unpack_from(header, buffers + 4 + number * _BUFFER.size)
        if length >= 8:
            (uncompressed,) = struct.unpack_from("<q", body, offset)
            decoded += length if uncompressed < 0 else uncompressed
    return decoded


def _field(table: memoryview, position: int, number: int) -> int:
    """The position of a table's field; 0 if the table does not have it."""
    (back,) = struct.unpack_from("<i", table, position)
    (size,) = struct.unpack_from("<H", table, position - back)
    entry = 4 + 2 * number
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", table, position - back + entry)
    return position + int(offset) if offset else 0


def _follow(table: memoryview, position: int) -> int:
    (offset,) = struct.unpack_from("<I", table, position)
    return position + int(offset)
