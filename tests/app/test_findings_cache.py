"""A dashboard reuses findings of an earlier one, and survives damaged cache files."""

import sqlite3
from pathlib import Path

import pytest
from fsdp_inspect_app.app_pages.runs import summaries as kept_findings
from fsdp_inspect_app.app_pages.runs.summaries import CachedFinding, FindingsCache, findings_file

FIRST, SECOND = CachedFinding("state 1", '{"a": 1}'), CachedFinding("state 2", "anything")


@pytest.fixture
def kept(tmp_path: Path) -> FindingsCache:
    return FindingsCache(tmp_path / "cache" / "findings.sqlite", "1", tmp_path / "runs")


def again(kept: FindingsCache, **changes: object) -> FindingsCache:
    known = {"file": kept.file, "version": kept.version, "folder": kept.folder}
    return FindingsCache(**{**known, **changes})


def test_what_was_kept_is_found_by_the_next_one(kept: FindingsCache) -> None:
    assert kept.load() == {}
    kept.keep({"one": FIRST, "two": FIRST})
    kept.keep({"two": SECOND})
    assert again(kept).load() == {"one": FIRST, "two": SECOND}


def test_folders_and_versions_do_not_mix(kept: FindingsCache) -> None:
    kept.keep({"one": FIRST})
    assert again(kept, version="2").load() == {}
    assert again(kept, folder=Path("/elsewhere")).load() == {}


def test_nobody_else_may_look_into_the_folder(kept: FindingsCache) -> None:
    kept.keep({"one": FIRST})
    assert kept.file.parent.stat().st_mode & 0o077 == 0


def test_the_oldest_findings_go_when_there_are_too_many(
    kept: FindingsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_findings, "MOST_KEPT", 2)
    for number in range(4):
        kept.keep({str(number): FIRST})
    assert sorted(kept.load()) == ["2", "3"]


@pytest.mark.parametrize("content", [b"no database", b"", b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_as_if_it_were_not_there(kept: FindingsCache, content: bytes) -> None:
    kept.file.parent.mkdir()
    kept.file.write_bytes(content)
    assert kept.load() == {}
    kept.keep({"one": FIRST})
    kept.keep({"one": FIRST})  # the first call may have removed the damaged file
    assert kept.load() == {"one": FIRST}


def test_a_table_of_another_shape_is_left_alone(kept: FindingsCache) -> None:
    kept.file.parent.mkdir()
    with sqlite3.connect(kept.file) as database:
        database.execute("CREATE TABLE findings (something TEXT)")
    kept.keep({"one": FIRST})
    assert kept.load() == {}


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = FindingsCache(tmp_path / "file" / "findings.sqlite", "1", tmp_path)
    kept.keep({"one": FIRST})
    assert kept.load() == {}


def test_a_database_that_another_one_writes_is_no_error(
    kept: FindingsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.keep({"one": FIRST})
    monkeypatch.setattr(kept_findings, "_LOCKED_FOR_S", 0.05)
    with sqlite3.connect(kept.file) as other:
        other.execute("BEGIN EXCLUSIVE")
        kept.keep({"two": FIRST})
        assert kept.load() == {}
    assert kept.load() == {"one": FIRST}


def test_the_file_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_INSPECT_CACHE", "/chosen")
    assert findings_file() == Path("/chosen/findings.sqlite")
    monkeypatch.setenv("FSDP_INSPECT_CACHE", "")
    assert findings_file() is None


def test_else_it_lies_in_the_users_folder_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_INSPECT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert findings_file() == Path("/somewhere/fsdp-inspect/findings.sqlite")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert findings_file() == Path("/home/me/.cache/fsdp-inspect/findings.sqlite")
