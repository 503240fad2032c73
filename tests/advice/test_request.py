"""Which commands does advice print, and which of their flags does it say to leave out?"""

import pytest

from fsdp_inspect.advice.request import AdviceRequest, how_to_verify
from fsdp_inspect.trace.run import RunManifest
from tests.builders import RunBuilder

TRAINER = ["torchrun", "-m", "instrumented_trainer"]


def manifest_of(*flags: str) -> RunManifest:
    return RunBuilder(("layers.0",), command=[*TRAINER, *flags]).build().manifest


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param(["--wrap=root", "--steps=4"], "--wrap=root", id="units"),
        pytest.param(
            ["--microbatches=4", "--accumulation-sync", "last"],
            "--microbatches=4, --accumulation-sync",
            id="accumulation",
        ),
        pytest.param(["--no-reshard-after-backward"], "--no-reshard-after-backward", id="negated"),
    ],
)
def test_flags_that_the_trainer_refuses_beside_a_plan_are_named(flags, named):
    again, _ = how_to_verify(manifest_of(*flags), AdviceRequest())
    assert again.endswith(f" --plan plan.toml  # without {named}: the plan sets it")


def test_a_command_without_such_flags_is_printed_alone():
    again, _ = how_to_verify(manifest_of("--steps=4", "--name=a"), AdviceRequest())
    assert again == ("torchrun -m instrumented_trainer --steps=4 --name=a-advised --plan plan.toml")
