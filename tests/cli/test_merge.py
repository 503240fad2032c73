import shutil

from fsdp_inspect.store.folder import rank_folder


def make_parts(run, folder):
    parts = []
    for node, gone in enumerate([(2, 3), (0, 1)]):
        part = folder / f"node-{node}"
        shutil.copytree(run, part)
        for rank in gone:
            shutil.rmtree(rank_folder(part, 0, rank))
        parts.append(part)
    return parts


def test_parts_are_merged_and_the_run_opens(invoke, runs_folder, tmp_path):
    parts = make_parts(runs_folder / "four", tmp_path)
    ended = invoke("store", "merge", *parts, "--out", tmp_path / "merged")
    assert (ended.code, ended.err) == (0, "")
    assert "Run four: 4 of 4 ranks" in ended.out
    assert invoke("summary", tmp_path / "merged").code == 0


def test_a_folder_that_is_there_is_refused(invoke, runs_folder, tmp_path):
    parts = make_parts(runs_folder / "four", tmp_path)
    ended = invoke("store", "merge", *parts, "--out", tmp_path)
    assert ended.code == 1
    assert "exists already" in ended.err
