"""Stacks in the form of faulthandler."""

import faulthandler
import threading
from pathlib import Path

from hypothesis import given, strategies as st

from fsdp_inspect.trace.stack_dumps import DumpSource, parse_dump


def test_a_dump_of_this_python_names_the_line_of_the_user(tmp_path: Path) -> None:
    head = f'{{"training_thread": "{threading.get_ident():#018x}", "clock_ns": 5}}\n'
    with (tmp_path / "stacks.txt").open("w") as file:
        file.write(head)
        file.flush()
        faulthandler.dump_traceback(file)

    dump = parse_dump((tmp_path / "stacks.txt").read_text(), DumpSource.WATCHDOG)

    assert dump is not None
    assert dump.clock_ns == 5
    assert dump.training is not None
    frame = dump.training.user_frame
    assert frame is not None
    assert frame.file == __file__
    assert frame.function == "test_a_dump_of_this_python_names_the_line_of_the_user"


def test_a_crash_has_its_signal() -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/home/me/train.py", line 12 in crash\n'
    )

    dump = parse_dump(text, DumpSource.CRASH)

    assert dump is not None
    assert dump.fatal == "Segmentation fault"
    assert dump.training is not None
    assert str(dump.training.user_frame) == "/home/me/train.py:12"


@given(st.text())
def test_any_text_gives_a_dump_or_none(text: str) -> None:
    dump = parse_dump(text, DumpSource.SIGTERM)
    assert dump is None or dump.threads
