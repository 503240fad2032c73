from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsdp_inspect.trace.plan import Plan
from fsdp_inspect.writing import replace_file


def test_refused_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "rank.json"
    target.mkdir()
    (target / "in the way").touch()
    with pytest.raises(OSError, match=r"rank\.json"):
        replace_file(target, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank.json"]


def test_all_ranks_may_save_one_plan_at_once(tmp_path: Path) -> None:
    plan = Plan(units=[{"modules": [""]}, {"modules": ["layers.*"]}])
    path = tmp_path / "plan.toml"
    with ThreadPoolExecutor(8) as ranks:
        for saved in [ranks.submit(plan.dump, path) for _ in range(400)]:
            saved.result()
    assert Plan.load(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]
