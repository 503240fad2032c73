"""The harness reproduces its inputs, and the current code passes a few of each target."""

import pytest

from tests.conftest import EXHAUSTIVE
from tests.studies.fuzz.corpus import make_corpus, seeded
from tests.studies.fuzz.targets import TARGETS
from tests.studies.fuzz.worker import catch_hangs, read_one

NUM_INPUTS = {"guard": 3, "exhaustive": 12}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("fuzz") / "work")


@pytest.mark.filterwarnings("ignore")  # numpy warns about unusual values
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_mutated_input_shows_a_traceback(request, target, corpus, monkeypatch):
    monkeypatch.setenv("FSDP_INSPECT_MAX_MEMORY", "1GiB")
    num_inputs = NUM_INPUTS["exhaustive" if request.config.getoption(EXHAUSTIVE) else "guard"]
    with catch_hangs():
        for number in range(num_inputs):
            content = target.make(corpus, seeded(3, target.name, number))
            assert read_one(target, corpus, content) is None


def test_an_input_follows_from_seed_target_and_number(corpus):
    target = TARGETS[0]
    once, again = (target.make(corpus, seeded(1, target.name, 7)) for _ in range(2))
    assert once == again
    assert once != target.make(corpus, seeded(1, target.name, 8))
