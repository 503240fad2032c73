"""`run.json` and `rank.json` are complete and checked, or rejected with a message."""

import json
from pathlib import Path

import pytest

from fsdp_inspect.errors import CorruptFileError, SchemaVersionError
from fsdp_inspect.store.records import decode_record, encode_record
from fsdp_inspect.trace.run import RankRecord, RunManifest
from tests.store.run_files import make_manifest, make_record


def decode(encoded: bytes) -> RunManifest:
    return decode_record(encoded, RunManifest, "runs/a/run.json")


def test_manifest_comes_back_equal() -> None:
    manifest = make_manifest(config={"path": "ä\u2028", "rates": [1e-5, 3]}, tags=["x"])
    assert decode(encode_record(manifest)) == manifest


def test_rank_record_comes_back_equal() -> None:
    record = make_record(3, dropped={"events": 2}, problems=["memory: the disk is full"])
    assert decode_record(encode_record(record), RankRecord, "rank.json") == record


def test_setting_that_json_cannot_say_is_written_as_text_or_null() -> None:
    manifest = make_manifest(config={"where": Path("runs"), "loss": float("nan")})
    assert decode(encode_record(manifest)).config == {"where": "runs", "loss": None}


def test_half_of_a_surrogate_pair_is_written_as_a_question_mark() -> None:
    manifest = make_manifest(config={"path": "runs/\udce9"}, tags=["\ud800x"])
    changed = decode(encode_record(manifest))
    assert (changed.config, changed.tags) == ({"path": "runs/?"}, ["?x"])
    assert changed.model_copy(update={"config": {}, "tags": []}) == make_manifest()


def test_every_changed_bit_is_noticed_or_changes_nothing() -> None:
    encoded = encode_record(make_manifest())
    changes = 0
    for position in range(0, len(encoded), 3):
        changed = bytearray(encoded)
        changed[position] ^= 1 << position % 8
        try:
            assert decode(bytes(changed)) == make_manifest()
        except (CorruptFileError, SchemaVersionError):
            changes += 1
    assert changes > len(encoded) // 3 - 20


def test_changed_value_is_named_as_a_checksum_that_differs() -> None:
    encoded = encode_record(make_manifest()).replace(b'"gloo"', b'"nccl"')
    with pytest.raises(CorruptFileError, match=r"runs/a/run\.json.*changed.*remove its crc32"):
        decode(encoded)


def test_record_edited_by_hand_opens_without_its_checksum() -> None:
    fields = json.loads(encode_record(make_manifest()))
    del fields["crc32"]
    fields["name"] = "my best run"
    assert decode(json.dumps(fields).encode()).name == "my best run"


def test_record_cut_off_is_named_with_its_size() -> None:
    message = r"run\.json \(40 bytes\) cannot be parsed: invalid JSON"
    with pytest.raises(CorruptFileError, match=message):
        decode(encode_record(make_manifest())[:40])


@pytest.mark.parametrize(
    "foreign",
    [b'{"name": "package"}', b"[1, 2]", b'{"schema_version": "x"}'],
    ids=["object", "list", "odd version"],
)
def test_foreign_json_is_named_as_such(foreign: bytes) -> None:
    with pytest.raises(CorruptFileError, match=r"without a schema_version|invalid schema version"):
        decode(foreign)


def test_bytes_that_are_no_text_are_named_as_such() -> None:
    with pytest.raises(CorruptFileError, match="invalid JSON"):
        decode(b"\x80\x04\x95")


def test_impossible_value_is_named_with_its_place() -> None:
    fields = json.loads(encode_record(make_manifest()))
    del fields["crc32"]
    fields["units"][1]["num_parameters"] = "many"
    with pytest.raises(CorruptFileError, match=r"units\.1\.num_parameters is 'many'"):
        decode(json.dumps(fields).encode())


def test_newer_record_is_refused_though_its_fields_are_unknown() -> None:
    with pytest.raises(SchemaVersionError, match=r"version 7.*a version up to 1.*Update"):
        decode(b'{"schema_version": 7, "everything": "is different"}')


def test_field_of_a_later_version_is_ignored() -> None:
    fields = json.loads(encode_record(make_manifest()))
    del fields["crc32"]
    assert decode(json.dumps({**fields, "weather": "fine"}).encode()) == make_manifest()
