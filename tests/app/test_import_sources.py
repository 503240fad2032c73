"""Only files in the folder are offered for import, with any links and names."""

import io

import pytest
from fsdp_inspect_app.app_pages.imports.sources import (
    SourceKind,
    find_source,
    keep_uploads,
    list_sources,
)

from fsdp_inspect.errors import StoreError
from tests.app.synthetic import make_run, write_run
from tests.importing.snapshots import FakeAllocator, train

TRACE = '{"traceEvents": []}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks' traces, two ranks' snapshots, a run, and links out of the folder."""
    base = tmp_path_factory.mktemp("base")
    runs, outside = base / "runs", base / "outside"
    (runs / "traces").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    for rank in (0, 1):
        (runs / "traces" / f"rank{rank}.json").write_text(TRACE)
        (runs / "snapshots").mkdir(exist_ok=True)
        train(FakeAllocator()).dump(runs / "snapshots" / f"rank{rank}.pickle")
    (runs / "notes.txt").write_text("no trace")
    (runs / "expected.json").write_text('{"step_time_ns": 1}')
    (runs / "list.json").write_text("[1, 2]")
    (runs / ".hidden.json").write_text("{}")
    (runs / "no-snapshot.pickle").write_text("no pickle at all")
    write_run(runs / "run", make_run(num_steps=1))
    (runs / "link.json").symlink_to(outside / "secret.json")
    (runs / "linked").symlink_to(outside)
    (runs / "loop").symlink_to(runs)
    return runs


def test_traces_and_snapshots_are_listed_alone_and_as_folders(folder):
    listed = {source.name: source for source in list_sources(folder)
              if not source.name.startswith("loop")}  # fmt: skip
    assert {name: source.kind for name, source in listed.items()} == {
        "traces": SourceKind.TRACES,
        "traces/rank0.json": SourceKind.TRACE,
        "traces/rank1.json": SourceKind.TRACE,
        "snapshots": SourceKind.SNAPSHOTS,
        "snapshots/rank0.pickle": SourceKind.SNAPSHOT,
        "snapshots/rank1.pickle": SourceKind.SNAPSHOT,
    }
    assert (listed["traces"].num_files, listed["traces"].num_bytes) == (2, 2 * len(TRACE))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("link.json", id="link to a file outside"),
        pytest.param("linked/secret.json", id="file behind a link outside"),
        pytest.param("../outside/secret.json", id="up"),
        pytest.param("traces/../../outside/secret.json", id="down and up"),
        pytest.param("/etc/passwd", id="absolute"),
        pytest.param("traces/rank0.json\0", id="NUL"),
        pytest.param("run/run.json", id="file of a run"),
        pytest.param(".hidden.json", id="hidden"),
        pytest.param("no-snapshot.pickle", id="no snapshot"),
        pytest.param("expected.json", id="no trace"),
        pytest.param("", id="nothing"),
    ],
)
def test_what_is_not_in_the_listing_cannot_be_named(folder, name):
    assert find_source(folder, name) is None


def test_a_link_that_goes_round_ends(folder):
    assert max(source.name.count("loop") for source in list_sources(folder)) <= 4


def test_a_folder_that_is_a_run_or_is_gone_has_nothing_to_import(folder, tmp_path):
    assert list_sources(folder / "run") == []
    assert list_sources(tmp_path / "gone") == []


class Sent:
    """A file as the browser sends it."""

    def __init__(self, name, content):
        self.name = name
        self.read = io.BytesIO(content).read


def test_an_upload_becomes_a_source(tmp_path):
    assert keep_uploads(tmp_path, [Sent("../a b.json", TRACE.encode())]).endswith("/a-b.json")
    assert len(list_sources(tmp_path)) == 1


def test_uploads_of_several_ranks_become_one_source(tmp_path):
    files = [Sent("rank.json", TRACE.encode()) for _ in range(3)]
    source = find_source(tmp_path, keep_uploads(tmp_path, files))
    assert (source.kind, source.num_files) == (SourceKind.TRACES, 3)


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param([b"no trace"], id="no trace"),
        pytest.param([TRACE.encode(), b"{}"], id="one of two"),
        pytest.param([b""], id="empty"),
    ],
)
def test_an_upload_that_cannot_be_imported_is_refused_and_not_kept(tmp_path, contents):
    with pytest.raises(StoreError, match="not all files can be imported"):
        keep_uploads(tmp_path, [Sent(f"{n}.json", each) for n, each in enumerate(contents)])
    assert list((tmp_path / "uploads").iterdir()) == []


def test_an_upload_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "uploads").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be saved"):
        keep_uploads(tmp_path, [Sent("a.json", TRACE.encode())])


def test_an_upload_follows_no_link_out_of_the_folder(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "uploads").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="leads out of the folder"):
        keep_uploads(runs, [Sent("a.json", TRACE.encode())])
