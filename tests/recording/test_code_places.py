"""The line of code of a unit's collective: remembered, and looked for again when it changes."""

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn

from fsdp_inspect.recording.code_places import CodePlaces, read_variables


def issue(places: CodePlaces, unit: int = 3) -> int:
    """Stands for the recorder's code, which issues for its caller."""
    return places.find_again(unit)


def test_a_unit_that_is_called_from_the_same_line_has_the_same_place():
    places = CodePlaces()
    first, second, third = (run() for run in [lambda: issue(places)] * 3)
    assert first == second == third == 1
    assert len(places.new) == 1


def test_a_unit_that_is_called_from_another_line_has_another_place():
    places = CodePlaces()
    first = issue(places)
    second = issue(places)
    again = issue(places)
    assert len({first, second, again}) == 3
    lines = [place.line for _, place in places.new]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 2]


def test_the_place_of_a_deeper_call_is_found_and_so_is_that_of_a_shallower_one():
    places = CodePlaces()

    def deeper(levels: int) -> int:
        return deeper(levels - 1) if levels else issue(places)

    places_of_depths = [deeper(levels) for levels in (5, 0, 5, 2)]
    assert len(set(places_of_depths)) == 1
    assert [place.function for _, place in places.new] == ["deeper"]


def test_units_have_places_of_their_own():
    places = CodePlaces()
    found = [issue(places, unit) for unit in (1, 2, 1, 2)]
    assert len(set(found)) == 1
    assert issue(places, 1) != found[0]
    assert issue(places, 2) != found[0]


class Issuing(nn.Module):
    """A module whose forward issues a collective, perhaps in a module below it."""

    def __init__(self, places: CodePlaces, below: nn.Module | None = None) -> None:
        super().__init__()
        self.places, self.below = places, below
        self.found = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = issue(self.places)
        return x if self.below is None else self.below(x)


def test_a_place_in_a_model_has_the_line_of_the_loop_that_called_the_model():
    places = CodePlaces()
    inner = Issuing(places)
    model = Issuing(places, below=inner)
    found = []
    for _ in range(2):
        model(torch.ones(1))
        found.append((model.found, inner.found))
    model(torch.ones(1))  # a pass from another line

    assert found[0] == found[1]
    assert inner.found != found[0][1]
    loops = {number: place.loop.rpartition(":") for number, place in places.new}
    first, last = int(loops[found[0][1]][2]), int(loops[inner.found][2])
    assert last == first + 2
    assert loops[found[0][1]][0].endswith("test_code_places.py")


class Big:
    """An object that a function deletes."""


def names_in(frame: FrameType) -> list[str]:
    return read_variables(frame, list)


def test_variables_that_were_read_are_not_kept() -> None:
    big = Big()
    seen = weakref.ref(big)
    assert "big" in names_in(sys._getframe())
    del big
    assert seen() is None


def test_variables_that_the_function_itself_has_read_stay() -> None:
    big = Big()
    own: dict[str, Any] = locals()
    assert "own" in names_in(sys._getframe())
    assert own["big"] is big


def test_variables_of_a_traced_function_stay() -> None:
    big = Big()

    def trace(frame: FrameType, *_: Any) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    sys._getframe().f_trace = trace
    try:
        assert "big" in names_in(sys._getframe())
    finally:
        sys.settrace(before)
    assert isinstance(big, Big)


def test_variables_of_a_class_body_stay() -> None:
    class Body:
        first = 1
        names = names_in(sys._getframe())
        second = first + 1

    assert "first" in Body.names
    assert Body.second == 2
