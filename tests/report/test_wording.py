import pytest

from fsdp_inspect.formatting import MISSING
from fsdp_inspect.report.wording import format_change, format_error, name_backend


@pytest.mark.parametrize(
    ("ratio", "change", "error"),
    [
        (None, MISSING, MISSING),
        (0, "=", "0%"),
        (-0.00001, "0.0%", "0.0%"),
        (0.00001, "0.0%", "0.0%"),
        (-0.227, "-22.7%", "-22.7%"),
        (0.1, "+10%", "+10%"),
    ],
)
def test_changes_and_errors_have_a_sign_and_nothing_has_none(ratio, change, error):
    assert (format_change(ratio), format_error(ratio)) == (change, error)


@pytest.mark.parametrize(
    ("backend", "name"), [("nccl", "nccl"), ("fake", "emulated"), ("", ""), (None, "")]
)
def test_torchs_fake_backend_is_called_emulated(backend, name):
    assert name_backend(backend) == name
