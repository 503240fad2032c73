"""A packed block can be read with its own description."""

import json
import struct

import numpy as np
import pytest
from fsdp_inspect_app.timeline.payload import pack


def unpack(block):
    """Unpack by the layout in `packing`, independent of its code."""
    (length,) = struct.unpack_from("<I", block)
    header = json.loads(block[8 : 8 + length])
    offset, columns = 8 + length + -length % 8, {}
    for column in header.pop("columns"):
        dtype = np.dtype("<" + column["dtype"])
        values = np.frombuffer(block, dtype, column["length"], offset)
        columns[column["name"]] = values
        offset += values.nbytes + -values.nbytes % 8
    assert offset == len(block)
    return header, columns


def test_header_and_columns_come_back_as_they_were():
    columns = {
        "start": np.array([0.5, -1.0, np.nan]),
        "lane": np.array([1, 2, 65535], dtype=np.uint16),
        "look": np.array([7], dtype=np.uint8),
        "empty": np.empty(0),
    }
    header, unpacked = unpack(pack({"name": "layers.0 <b>ü"}, columns))
    assert header == {"name": "layers.0 <b>ü"}
    for name, values in columns.items():
        np.testing.assert_array_equal(unpacked[name], values)


def test_a_dtype_that_the_browser_cannot_read_is_refused():
    with pytest.raises(ValueError, match=r"'start' has dtype int64.*f8"):
        pack({}, {"start": np.array([1], dtype=np.int64)})
