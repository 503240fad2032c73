"""What a recording prints about the run: after a standstill, and at its end."""

from pathlib import Path

import pytest

from fsdp_inspect.recording.patches import describe_internal
from fsdp_inspect.recording.verdict import tell_place
from fsdp_inspect.recording.watchdog import print_diagnosis
from tests.app.synthetic import make_run, write_run
from tests.browser.states import write_crashed


@pytest.mark.distributed
def test_a_standstill_that_has_ended_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training may move on while the diagnosis runs."""
    write_run(tmp_path / "healthy", make_run())
    write_crashed(tmp_path / "crashed")

    assert print_diagnosis(tmp_path / "healthy") == ""
    assert capsys.readouterr().err == (
        "fsdp_inspect: The ranks did not move for a while, and have moved on since.\n"
    )
    said = print_diagnosis(tmp_path / "crashed")
    assert "Rank 1 never reached" in said
    assert "\n" not in said
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_removed_folder_is_said_instead_of_a_command_that_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_place(tmp_path / "gone")
    said = capsys.readouterr().err
    assert f"the folder {tmp_path / 'gone'} is gone: something removed it" in said
    assert "fsdp-inspect show" not in said


def test_an_error_that_cannot_be_described_has_its_class() -> None:
    class Broken(Exception):
        def __repr__(self) -> str:
            raise ValueError

    assert describe_internal(Broken()) == "an internal error: Broken"
