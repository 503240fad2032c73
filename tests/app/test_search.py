from fsdp_inspect_app.timeline.track_set import Search, parse_search

LABELS = ("forward", "all-gather", "exposed all-gather", "exposed reduce-scatter")
NAMES = ("(root)", "layers.1", "layers.10", "norm, lm_head")


def parse(text):
    return parse_search(text, LABELS, NAMES)


def test_a_search_names_a_unit_a_kind_or_a_rank():
    assert parse("  ") is None
    assert parse("Layers.1") == Search(None, None, frozenset({1}))
    assert parse("layers") == Search(None, None, frozenset({1, 2}))
    assert parse("norm, lm_head") == Search(None, None, frozenset({3}))
    assert parse("all-gather") == Search(None, frozenset({1}), None)
    assert parse("exposed") == Search(None, frozenset({2, 3}), None)
    assert parse("rank 3") == Search(3, None, None)


def test_a_search_combines_them():
    found = Search(2, frozenset({2}), frozenset({1}))
    assert parse("rank 2 exposed all-gather layers.1") == found
    assert parse("exposed norm, lm_head") == Search(None, frozenset({2, 3}), frozenset({3}))


def test_an_unknown_name_finds_nothing():
    assert parse("no such layer").is_empty
    assert parse("rank 2 nonsense").is_empty
