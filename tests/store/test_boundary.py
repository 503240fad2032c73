"""A server reads files of its folder of runs only."""

import os

import pytest

from fsdp_inspect.errors import StoreError
from fsdp_inspect.store.boundary import files_of_run, is_in_folder, refuse_links_out
from tests.app.synthetic import make_run, write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs" / "run", make_run(num_steps=1))
    (tmp_path / "secret").write_text("a password")
    return tmp_path / "runs"


def test_what_lies_in_the_folder_is_inside(runs):
    assert is_in_folder(runs, runs)
    assert is_in_folder(runs / "run" / "run.json", runs)
    assert is_in_folder(runs / "run" / ".." / "run", runs)


@pytest.mark.parametrize(
    "path", ["../secret", "run/../../secret", "/etc/passwd", "nothing", "a\0b"]
)
def test_what_lies_elsewhere_or_nowhere_is_not(runs, path):
    assert not is_in_folder(runs / path, runs)


def test_links_are_followed_before_judging(runs):
    (runs / "out").symlink_to(runs.parent / "secret")
    (runs / "within").symlink_to(runs / "run")
    (runs / "circle").symlink_to(runs / "circle")
    assert not is_in_folder(runs / "out", runs)
    assert is_in_folder(runs / "within", runs)
    assert not is_in_folder(runs / "circle", runs)


def test_a_folder_of_runs_may_itself_be_a_link(runs, tmp_path):
    (tmp_path / "alias").symlink_to(runs)
    assert is_in_folder(tmp_path / "alias" / "run", tmp_path / "alias")


def test_the_files_of_a_run_are_found_down_to_its_ranks(runs):
    names = {os.path.relpath(file.path, runs / "run") for file in files_of_run(runs / "run", runs)}
    assert {"run.json", "attempt-000/rank-00000/rank.json"} <= names


@pytest.mark.parametrize(
    "place", ["run.json", "attempt-000", "attempt-000/rank-00000", "attempt-000/rank-00000/x.json"]
)
def test_a_link_out_is_refused_wherever_it_lies_in_a_run(runs, place):
    target = runs / "run" / place
    if target.exists():
        target.rename(runs.parent / "moved")
    target.symlink_to(runs.parent / ("moved" if (runs.parent / "moved").exists() else "secret"))
    with pytest.raises(StoreError, match="link to a place outside the folder of runs"):
        refuse_links_out(runs / "run", runs)


def test_a_link_within_the_folder_is_followed(runs):
    (runs / "run" / "note").symlink_to(runs / "run" / "run.json")
    refuse_links_out(runs / "run", runs)
