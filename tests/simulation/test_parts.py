"""The memory of a part of a recorded unit, from its moments between the uses of parameters."""

from hypothesis import given, strategies as st

from fsdp_inspect.simulation.memory import Course, FirstUse, change_of, rise_of, time_share_of

ATTENTION, FEED_FORWARD = ("norm1", "wqkv", "wo"), ("norm2", "w1", "w2")
FORWARD = Course(
    (
        FirstUse("norm1", 5, 20),
        FirstUse("wqkv", 10, 60),
        FirstUse("wo", 40, 50),
        FirstUse("norm2", 45, 55),
        FirstUse("w1", 50, 130),
        FirstUse("w2", 100, 120),
    ),
    end=80,
    high=130,
)


def test_each_part_has_the_moments_between_its_first_use_and_the_next_parts():
    assert (change_of(FORWARD, ATTENTION), change_of(FORWARD, FEED_FORWARD)) == (45, 35)
    assert rise_of(FORWARD, ATTENTION) == 60
    assert rise_of(FORWARD, FEED_FORWARD) == 130 - 45


def test_what_comes_before_the_first_use_belongs_to_the_part_that_it_leads_to():
    backward = Course((FirstUse("w2", 30, 40), FirstUse("wo", -10, 35)), end=-50, high=90)
    assert change_of(backward, FEED_FORWARD) == -10
    assert rise_of(backward, FEED_FORWARD) == 90
    assert rise_of(backward, ATTENTION) == 45


def test_the_time_of_a_part_counts_from_the_first_use_of_all():
    course = Course(
        (
            FirstUse("norm1", 0, 0, time_ns=400),
            FirstUse("wo", 0, 0, time_ns=500),
            FirstUse("w1", 0, 0, time_ns=1000),
        ),
        end=0,
        high=0,
        end_ns=1400,
    )
    assert time_share_of(course, ATTENTION) == 0.6
    assert time_share_of(course, FEED_FORWARD) == 0.4
    assert time_share_of(FORWARD, ATTENTION) is None


def test_a_part_that_a_pass_never_uses_holds_nothing():
    assert (change_of(FORWARD, ("bias",)), rise_of(FORWARD, ("bias",))) == (0, 0)


LEVELS = st.integers(-1000, 1000)


@st.composite
def courses(draw: st.DrawFn) -> tuple[Course, set[str]]:
    """A course, and some of its parameters."""
    names = [f"p{number}" for number in range(draw(st.integers(1, 8)))]
    levels = [draw(LEVELS) for _ in names]
    uses = tuple(
        FirstUse(name, level, level + draw(st.integers(0, 500)))
        for name, level in zip(names, levels, strict=True)
    )
    end = draw(LEVELS)
    high = max(end, 0, *(use.high for use in uses)) + draw(st.integers(0, 100))
    return Course(uses, end, high), draw(st.sets(st.sampled_from(names)))


@given(courses())
def test_parts_add_up_and_none_rises_above_the_whole_from_the_lowest_level(
    drawn: tuple[Course, set[str]],
):
    course, own = drawn
    others = {use.parameter for use in course.uses} - own
    assert change_of(course, own) + change_of(course, others) == course.end
    lowest = min(0, course.end, *(use.level for use in course.uses))
    assert max(rise_of(course, own), rise_of(course, others)) <= course.high - lowest


@given(courses())
def test_the_whole_is_a_part_of_itself(drawn: tuple[Course, set[str]]):
    course, _ = drawn
    everything = {use.parameter for use in course.uses}
    assert change_of(course, everything) == course.end
    assert rise_of(course, everything) == course.high
