"""The report that a watchdog prints after it has seen a standstill."""

from pathlib import Path

import pytest

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
