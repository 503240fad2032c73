import json
import shutil

import pytest

from tests.builders import write_run
from tests.comparison.test_comparison import run_of_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`before/0..4` and `after/0..4` repeat two settings; `mixed` holds one of each."""
    root = tmp_path_factory.mktemp("compare")
    for side, commit, base in (("before", "old", 100), ("after", "new", 105)):
        for number in range(5):
            run = run_of_step(base + number, git_commit=commit, run_id=f"{side}-{number}")
            write_run(run, root / side / str(number))
    for side in ("before", "after"):
        shutil.copytree(root / side / "0", root / "mixed" / side)
    return root


def test_two_runs_are_compared(invoke, folder):
    done = invoke("compare", folder / "before" / "0", folder / "after" / "0")
    assert done.code == 0
    assert "code: git_commit: old -> new" in done.out
    assert "B and A do not differ significantly in step time. " in done.out


def test_folders_of_repeats_are_sides(invoke, folder):
    done = invoke("compare", folder / "before", folder / "after", "--json")
    compared = json.loads(done.out)
    assert [len(side["runs"]) for side in compared["sides"]] == [5, 5]
    assert compared["conclusions"][0]["verdict"] == "different"
    assert compared["metrics"][0]["judgements"][0]["p_value"] == pytest.approx(2 / 252)


def test_runs_given_one_by_one_are_taken_together_by_their_settings(invoke, folder):
    runs = [folder / side / str(number) for number in (0, 1) for side in ("before", "after")]
    compared = json.loads(invoke("compare", *runs, "--json").out)
    assert [len(side["runs"]) for side in compared["sides"]] == [2, 2]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        pytest.param(["before/0"], 2, "contains one run, which is one side", id="one run"),
        pytest.param(["before"], 2, "5 runs of the same settings, which is", id="one folder"),
        pytest.param(
            ["mixed", "before/1"], 1, "different runs: git_commit is 'new' in after", id="mixed"
        ),
        pytest.param(["before/0", "before/0"], 2, "contain the same run", id="the same run"),
        pytest.param(["before", "before/3"], 2, "contain the same run", id="one of the folder"),
        pytest.param(["before/0", "mixed/before"], 2, "contain the same run", id="its copy"),
        pytest.param(["before/0", "nowhere"], 1, "No run found at", id="no run"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_way_out(invoke, folder, given, code, said):
    done = invoke("compare", *(folder / one for one in given))
    assert done.code == code
    assert said in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err
