from fsdp_inspect.analysis.run_list import change_ratio, list_recorded_runs, measure_key_numbers
from fsdp_inspect.analysis.summary import measure_summary
from tests.analysis.test_lifetime import attempt
from tests.builders import steady_run, write_run


def test_runs_are_listed_newest_first(tmp_path):
    for age, name in enumerate(("old", "new")):
        write_run(steady_run(run_id=name, created_unix_ns=age), tmp_path / name)
    assert [run.id for run in list_recorded_runs(tmp_path)] == ["new", "old"]


def test_a_listed_run_says_what_ran(tmp_path):
    write_run(steady_run(world_size=2, num_steps=3), tmp_path / "a")
    [run] = list_recorded_runs(tmp_path)
    assert (run.status, run.world_size, run.num_ranks, run.num_steps) == ("complete", 2, 2, 3)
    assert (run.backend, run.device, run.model) == ("gloo", "cpu", "Decoder")


def test_the_parameters_of_one_pipeline_rank_are_not_those_of_the_run(tmp_path):
    for name in ("fsdp", "pp"):
        write_run(steady_run(mesh={name: 2}), tmp_path / name)
    listed = {run.id: run.num_parameters for run in list_recorded_runs(tmp_path)}
    assert listed == {"fsdp": 200, "pp": None}


def test_a_run_with_restarts_says_so(tmp_path):
    for number in range(2):
        write_run(attempt(number, starts_at=1000 * number), tmp_path / "run")
    [listed] = list_recorded_runs(tmp_path)
    assert listed.notes == ("8 completed steps in 2 attempts, 4 lost at a restart.",)


def test_an_unreadable_run_comes_last_with_the_reason(tmp_path):
    write_run(steady_run(created_unix_ns=1), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("not json")
    good, bad = list_recorded_runs(tmp_path)
    assert (good.id, bad.id, bad.status) == ("good", "bad", None)
    assert "invalid JSON" in bad.notes[0]


def test_a_folder_without_runs_lists_nothing(tmp_path):
    assert list_recorded_runs(tmp_path) == ()


def test_the_summary_of_a_run_has_the_numbers_of_its_digest():
    run = steady_run(world_size=2, num_steps=4)
    summary, digest = measure_key_numbers(run), measure_summary(run)
    assert summary.step_time_ns == digest.step_time_ns.typical
    assert summary.exposed_ns == digest.exposed_ns
    assert summary.overlap_ratio == digest.overlap_ratio
    assert summary.peak_allocated_bytes == digest.peak_allocated_bytes
    assert (summary.status, summary.source, summary.num_steps) == ("complete", "recorded", 4)


def test_a_change_is_a_share_of_the_baseline_and_missing_without_either():
    assert change_ratio(150, 100) == 0.5
    assert change_ratio(100, 100) == 0
    assert change_ratio(None, 100) is None
    assert change_ratio(100, None) is None
    assert change_ratio(100, 0) is None
