from fsdp_inspect.report import palette


def test_a_wait_has_the_look_of_its_collective_and_without_a_unit_that_of_others():
    assert palette.look_of_wait("all_gather", "layers.0") is palette.EXPOSED_ALL_GATHER
    assert palette.look_of_wait("all_reduce", "") is palette.EXPOSED_ALL_REDUCE
    assert palette.look_of_wait("broadcast", "layers.0") is palette.EXPOSED_OTHER
    assert palette.look_of_wait("all_gather", None) is palette.EXPOSED_OTHER


def test_every_exposed_part_is_hatched():
    exposed = [look for look in palette.PART_LOOKS.values() if look.label.startswith("exposed")]
    assert len(exposed) == 4
    assert all(look.hatched for look in exposed)
