"""The launch line is the recorded one with the plan applied and without conflicting options."""

import pytest

from fsdp_inspect.advice.code_change import write_launch_line
from fsdp_inspect.trace.run import RunManifest, ShardingCall, TrainingCode
from tests.builders import RunBuilder

TORCHRUN = ["torchrun", "--nproc-per-node", "2"]
TRAINER = [*TORCHRUN, "-m", "instrumented_trainer"]
RECORD = ["-m", "fsdp_inspect.record"]


def launched(*words: str, start: int = 3, function: str = "fully_shard") -> RunManifest:
    call = ShardingCall(function=function, file="train.py", line=1, units=[""])
    code = TrainingCode(launch=list(words), launched_at=start, calls=[call])
    return RunBuilder(("layers.0",), command=["python", *words[start:]], code=code).build().manifest


@pytest.mark.parametrize(
    "flags",
    [
        ["--wrap=root"],
        ["--microbatches=4", "--accumulation-sync", "last"],
        ["--no-reshard-after-backward"],
        ["--mesh", "2x2", "--forward-prefetch", "1", "--unshard-async-op"],
        ["--plan", "old.toml"],
        ["--plan=old.toml"],
    ],
    ids=" ".join,
)
def test_settings_that_the_trainer_refuses_beside_a_plan_are_left_out(flags):
    line = write_launch_line(launched(*TRAINER, *flags, "--steps", "4"), "plan.toml")
    assert line == f"{' '.join(TRAINER)} --steps 4 --plan plan.toml"


def test_the_run_gets_another_name():
    line = write_launch_line(launched(*TRAINER, "--name=a"), "plan.toml")
    assert line == f"{' '.join(TRAINER)} --name=a-advised --plan plan.toml"


def test_a_config_file_of_the_trainer_may_contain_sharding_settings():
    line = write_launch_line(launched(*TRAINER, "--config", "llama.toml"), "plan.toml")
    assert "--config llama.toml --plan plan.toml  # remove sharding settings from the" in line


def test_options_of_the_recorder_and_of_the_script_stay_apart():
    words = [*TORCHRUN, *RECORD, "--no-verdict", "--name", "a", "--out=runs", "train.py"]
    line = write_launch_line(launched(*words, "--name", "b", "--wrap", "c"), "plan.toml")
    expected = [*TORCHRUN, *RECORD, "--no-verdict", "--name", "a-advised", "--out=runs", "train.py"]
    assert line == " ".join([*expected, "--name", "b", "--wrap", "c"])


@pytest.mark.parametrize("given", [["--plan", "old.toml"], ["--plan=old.toml"]], ids=" ".join)
def test_a_script_that_reads_a_plan_gets_the_new_one_only(given):
    words = [*TORCHRUN, *RECORD, "-m", "pkg.train", *given, "--lr", "1"]
    line = write_launch_line(launched(*words, function="apply_plan"), "new plan.toml")
    assert line == f"{' '.join([*TORCHRUN, *RECORD])} -m pkg.train --plan 'new plan.toml' --lr 1"


def test_an_option_named_plan_of_another_script_stays():
    words = [*TORCHRUN, *RECORD, "train.py", "--plan", "free"]
    assert write_launch_line(launched(*words), "plan.toml").endswith("train.py --plan free")


def test_a_new_option_replaces_the_old_one_in_either_spelling():
    words = [*TORCHRUN, "-m", "torchtitan.train", "--parallelism.fsdp-reshard-after-forward=always"]
    option = {"--parallelism.fsdp_reshard_after_forward": "never"}
    line = write_launch_line(launched(*words), "plan.toml", options=option, reads_plan=False)
    assert line.endswith("torchtitan.train --parallelism.fsdp_reshard_after_forward never")


def test_options_of_accelerate_launch_change_where_they_are():
    words = [
        "accelerate",
        "launch",
        "--fsdp_reshard_after_forward",
        "true",
        "train.py",
        "--lr",
        "1",
    ]
    option = {"--fsdp_reshard_after_forward": "false"}
    line = write_launch_line(
        launched(*words, start=4), "plan.toml", starter_options=option, reads_plan=False
    )
    assert line.count("--fsdp_reshard_after_forward") == 1
    assert line.startswith("accelerate launch --fsdp_reshard_after_forward false train.py")


def test_an_unknown_start_is_stated():
    command = ["python", "-u", "train.py"]
    manifest = RunBuilder(("layers.0",), command=command, world_size=2).build().manifest
    assert write_launch_line(manifest, "plan.toml") == (
        "python -u train.py  # start 2 ranks as in the first run"
    )
