"""What the tests of the store share."""

import pytest

from fsdp_inspect.store import writer


@pytest.fixture(autouse=True)
def patient_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no disk that hangs."""
    monkeypatch.setattr(writer, "STALL_TIMEOUT_S", 300)
