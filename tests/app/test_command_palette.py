"""The command palette finds every run of a long list."""

from fsdp_inspect_app.command_palette import find_runs

NAMES = [f"llama-{number} · {number:04x}" for number in range(10_000)]


def test_a_run_far_down_the_list_is_found_by_all_words_in_any_case():
    assert find_runs(NAMES, "LLAMA-9999") == ["llama-9999 · 270f"]
    assert find_runs(NAMES, "270f run llama") == ["llama-9999 · 270f"]
    assert find_runs(NAMES, "no-such-run") == []


def test_the_first_runs_are_found_and_no_more_than_the_list_shows():
    assert find_runs(NAMES, "llama") == NAMES[:12]


def test_a_name_that_is_typed_whole_leads_the_newer_runs_that_contain_it():
    names = [f"nightly {number}" for number in range(3_000, 0, -1)]
    assert find_runs(names, "Nightly 17")[0] == "nightly 17"
