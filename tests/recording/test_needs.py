"""The table of private names fits this torch, and a change of one is seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_inspect.recording.torch_api import needs
from fsdp_inspect.trace.sharders import DDP, FSDP1, FSDP2


@pytest.mark.parametrize("sharder", [FSDP2, FSDP1, DDP])
def test_this_torch_has_every_name(sharder: str) -> None:
    assert needs.find_missing_name(sharder) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (None, "torch has no hooked"),
        (lambda self: None, "hooked takes (self), expected (self, first, second, ...)"),
        (lambda self, first, new, second: None, "hooked takes (self, first, new, second)"),
        (lambda self, second, first: None, "hooked takes (self, second, first)"),
    ],
)
def test_a_missing_or_moved_argument_is_named(
    changed: Callable[..., Any] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(needs.NAMES, "x", {"torch:hooked": ("self", "first", "second")})  # type: ignore[arg-type]
    monkeypatch.setattr("torch.hooked", changed, raising=False)
    assert expected in (needs.find_missing_name("x") or "")


@pytest.mark.parametrize(
    "harmless",
    [
        lambda self, first, second: None,
        lambda self, first, second, third=None: None,
        lambda this, one, two: None,
        lambda *args, **kwargs: None,
    ],
)
def test_a_harmless_change_is_accepted(
    harmless: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(needs.NAMES, "x", {"torch:hooked": ("self", "first", "second")})  # type: ignore[arg-type]
    monkeypatch.setattr("torch.hooked", harmless, raising=False)
    assert needs.find_missing_name("x") is None


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.NAMES, "x", {"torch.gone:hooked": None})  # type: ignore[arg-type]
    assert needs.find_missing_name("x") == "torch.gone does not exist"


def test_the_part_of_a_unit_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needs.UNIT_NAMES, "x", ("group.params.0._size", "group._state"))  # type: ignore[arg-type]
    group = SimpleNamespace(params=[SimpleNamespace(_size=1)], _state=None)
    assert needs.find_missing_part("x", SimpleNamespace(group=group)) is None
    del group._state
    assert needs.find_missing_part("x", SimpleNamespace(group=group)) == (
        "SimpleNamespace has no _state"
    )
