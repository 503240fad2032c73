from fsdp_inspect.recording.session import ReferencePasses

TEACHER, STUDENT = (0, False), (1, False)


def run(*steps: list[tuple[int, bool]]) -> list[list[bool]]:
    """Whether each forward without gradients belongs to its step."""
    passes, found = ReferencePasses(), []
    for step in steps:
        found.append([passes.note(key) for key in step])
        passes.end_step()
    return found


def test_a_teacher_of_every_step_belongs_to_the_steps_from_the_second_on() -> None:
    assert run([TEACHER], [TEACHER], [TEACHER, TEACHER]) == [[False], [True], [True, True]]


def test_an_evaluation_now_and_then_belongs_to_no_step() -> None:
    assert run([], [STUDENT], [], [], [STUDENT], []) == [[], [False], [], [], [False], []]


def test_evaluations_after_two_steps_in_a_row_belong_to_no_step() -> None:
    assert run([], [], [], [STUDENT], [STUDENT]) == [[], [], [], [False], [False]]


def test_an_evaluation_of_the_student_is_none_of_the_teachers_passes() -> None:
    assert run([TEACHER], [TEACHER, STUDENT], [TEACHER]) == [[False], [True, False], [True]]


def test_the_mode_tells_a_reference_pass_from_an_evaluation_of_the_same_unit() -> None:
    assert run([(1, True)], [(1, True), (1, False)], [(1, True)]) == [
        [False],
        [True, False],
        [True],
    ]
