"""An object is unchanged after its attributes are restored."""

import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from fsdp_inspect.recording.torch_api.attributes import replace_everywhere, set_attribute


class Machine:
    """A class with a method, so that its instances have the method without owning it."""

    def run(self):
        return "own"


def test_a_value_that_was_there_comes_back():
    target = SimpleNamespace(size=1)
    restore = set_attribute(target, "size", 2)
    assert target.size == 2
    restore()
    assert vars(target) == {"size": 1}


def test_what_the_instance_did_not_own_is_deleted_again():
    machine = Machine()
    restore = set_attribute(machine, "run", lambda: "ours")
    assert machine.run() == "ours"
    restore()
    assert vars(machine) == {}
    assert machine.run() == "own"


def test_a_value_that_somebody_else_set_meanwhile_stays():
    target = SimpleNamespace(size=1)
    restore = set_attribute(target, "size", 2)
    target.size = 3
    restore()
    assert target.size == 3


@given(st.permutations(range(4)), st.booleans())
def test_changes_are_restored_in_any_order(order: list[int], owned: bool) -> None:
    machine = Machine()
    if owned:
        machine.run = "owned"
    before = dict(vars(machine))
    restores = [set_attribute(machine, "run", number) for number in range(4)]
    left = set(range(4))
    for number in order:
        restores[number]()
        restores[number]()  # a second call changes nothing
        left.remove(number)
        if left:
            assert machine.run == (max(left) if 3 not in left else 3)
    assert vars(machine) == before


def test_a_function_is_replaced_under_every_name_that_modules_have_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def original():
        return "own"

    home, guest = ModuleType("home"), ModuleType("guest")
    home.run = guest.imported = original
    monkeypatch.setitem(sys.modules, "home", home)
    monkeypatch.setitem(sys.modules, "guest", guest)

    with ExitStack() as undo:
        replace_everywhere(undo, {original: lambda: "ours"})
        assert (home.run(), guest.imported()) == ("ours", "ours")

    assert (home.run(), guest.imported()) == ("own", "own")
