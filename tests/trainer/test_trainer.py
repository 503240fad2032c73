import argparse
import re

import pytest
import torch.distributed as dist

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.__main__ import main
from instrumented_trainer.command_line import check_settings
from instrumented_trainer.runtime import process_group, read_runtime
from instrumented_trainer.trainer import choose_run_folder, prepare, train

SMALL = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 64,
    "seq_len": 16,
    "batch_size": 2,
    "steps": 2,
    "data": argparse.__file__,
    "record": False,
}


def prepared(**settings: object):
    return prepare(check_settings({**SMALL, **settings}), read_runtime())


def test_one_process_is_one_rank_without_torchrun(capsys):
    run = prepared()
    with process_group(run.runtime):
        result = train(run)
    assert not dist.is_initialized()
    assert list(result.losses) == [1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: 35.0K parameters in 4 FSDP units on 1 cpu rank (1 shard)"
    assert lines[1].startswith("step 1/2  loss 5.5")


def test_losses_are_logged_as_often_as_asked_and_at_the_end():
    run = prepared(steps=5, log_every=2)
    with process_group(run.runtime):
        assert list(train(run).losses) == [2, 4, 5]


def test_a_process_group_that_exists_is_used_and_left(tmp_path):
    run = prepared()
    with process_group(run.runtime):
        with process_group(run.runtime):
            assert dist.get_world_size() == 1
        assert dist.is_initialized()


def test_presets_say_how_they_train_unless_told():
    config = prepared(batch_size=None, seq_len=None).config
    assert (config.seq_len, config.batch_size, config.lr) == (64, 4, 3e-3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dim": 30}, "dim is 30 and num_heads is 4. Expected an even number of channels"),
        ({"num_kv_heads": 3}, "num_heads is 4 and num_kv_heads is 3"),
        ({"data": "absent.txt"}, "Data not found: 'absent.txt'"),
        ({"checkpoint_every": 5}, "checkpoint_every is 5 but checkpoint_dir is not set"),
        ({"device_memory": "2"}, "device_memory is '2'. Expected an amount above 0 with a unit"),
        (
            {"device_memory": "1GiB", "record": False},
            "device_memory is '1GiB', but record is false",
        ),
        ({"memory_steps": "soon"}, "memory_steps is 'soon'. Expected auto, none, or step numbers"),
        (
            {"reshard_after_backward": False},
            "a step has one microbatch. The weights change after it",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_ranks_meet(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        prepared(**settings)
    assert not dist.is_initialized()


def test_a_plan_that_leaves_parameters_out_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[units]]\nmodules = ["layers.*"]\n')
    with pytest.raises(
        ConfigError, match=r"has no unit for 3 parameters, such as 'lm_head.weight'"
    ):
        prepared(plan=str(path))


def test_compile_without_a_compiler_is_refused_early(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler for the CPU"):
        prepared(compile=True)


def test_a_bad_setting_ends_with_2_before_any_process_group(monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process group was started")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    assert main(["--mesh", "3x1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(
        "instrumented_trainer: mesh is '3x1', which has 3 ranks, but the world size is 1."
    )


def test_only_rank_0_complains(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("instrumented_trainer.__main__._PATIENCE_S", 0.0)
    assert main(["--stepz", "3"]) == 2
    assert capsys.readouterr() == ("", "")


def test_torchrun_is_told_so_that_its_report_ends_with_the_reason(monkeypatch, tmp_path):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    main(["--stepz", "3"])
    assert "Unknown setting '--stepz'" in path.read_text()


def test_run_folders_are_unique_and_named_after_time_and_model(tmp_path):
    config = check_settings({"runs_dir": str(tmp_path), "name": "lr 3/4"})
    first, second = choose_run_folder(config), choose_run_folder(config)
    assert first != second
    assert first.parent == tmp_path
    assert re.fullmatch(r"\d{8}-\d{6}-lr-3-4-[0-9a-f]{4}", first.name)


def test_a_job_that_torchrun_starts_again_goes_on_in_its_folder(tmp_path, monkeypatch):
    config = check_settings({"runs_dir": str(tmp_path)})
    for name in ("20260101-000000-tiny-aaaa", "20260102-000000-tiny-bbbb", "20260103-small-cccc"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert choose_run_folder(config).name == "20260102-000000-tiny-bbbb"
    other = check_settings({"runs_dir": str(tmp_path), "name": "else"})
    assert choose_run_folder(other).name.endswith(tuple("0123456789abcdef"))
