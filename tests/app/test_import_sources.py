"""Only files in the folder are offered for import, whatever links and names exist."""

import pytest
from fsdp_inspect_app.import_sources import SourceKind, find_source, list_sources

from tests.app.synthetic import make_run, write_run
from tests.importing.snapshots import FakeAllocator, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks' traces, two ranks' snapshots, a run, and links out of the folder."""
    base = tmp_path_factory.mktemp("base")
    runs, outside = base / "runs", base / "outside"
    (runs / "traces").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    for rank in (0, 1):
        (runs / "traces" / f"rank{rank}.json").write_text("{}" * 10)
        (runs / "snapshots").mkdir(exist_ok=True)
        train(FakeAllocator()).dump(runs / "snapshots" / f"rank{rank}.pickle")
    (runs / "notes.txt").write_text("no trace")
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
    assert (listed["traces"].num_files, listed["traces"].num_bytes) == (2, 40)


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
