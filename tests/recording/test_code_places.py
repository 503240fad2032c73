"""The line of code of a unit's collective: remembered, and looked for again when it changes."""

from fsdp_inspect.recording.code_places import CodePlaces


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
