from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.step_times import measure_overlap
from fsdp_inspect.errors import CorruptFileError
from tests.builders import steady_run


def test_an_answer_is_that_of_the_question():
    damage = []
    assert try_measure(measure_overlap, steady_run(), damage) == measure_overlap(steady_run())
    assert damage == []


def test_damage_is_said_and_leaves_the_question_open():
    def read(run):
        raise CorruptFileError("events.parquet is cut off.")

    damage = ["before"]
    assert try_measure(read, steady_run(), damage) is None
    assert damage == ["before", "events.parquet is cut off."]
