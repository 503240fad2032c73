"""The command that started the ranks is recorded as typed by the user."""

import pytest

from fsdp_inspect.recording.environment import shorten_starter


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("/usr/bin/python /opt/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/usr/bin/python -m torch.distributed.run --nproc-per-node 2 train.py", "torchrun"),
        ("/usr/bin/python /opt/bin/accelerate launch --fsdp_version 2 train.py", "accelerate"),
        ("python -m accelerate.commands.launch --fsdp_version 2 train.py", "accelerate launch"),
    ],
)
def test_paths_of_the_interpreter_and_of_the_starter_are_left_out(words, expected):
    shortened = " ".join(shorten_starter(words.split()))
    assert shortened.startswith(expected)
    assert "/" not in shortened
    assert shortened.endswith(" train.py")


@pytest.mark.parametrize("words", ["bash job.sh", "slurmstepd: [1.0]", "python -m pkg.spawn", ""])
def test_another_parent_is_no_starter(words):
    assert shorten_starter(words.split()) == []
