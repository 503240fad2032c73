import sys

import pytest
import torch

from instrumented_trainer.progress import StepReport, make_reporter, read_memory


def report(**changes: object) -> StepReport:
    values = {
        "step": 3,
        "num_steps": 10,
        "loss": 1.23456,
        "learning_rate": 3e-4,
        "gradient_norm": 0.5,
        "step_time_ns": 250_000_000,
        "num_tokens": 1000,
        "memory_bytes": 3 << 20,
        "memory_kind": "resident",
    }
    return StepReport(**(values | changes))


def test_a_step_is_one_plain_line_where_there_is_no_terminal(capsys):
    make_reporter(10, 0, is_first=True).step(report())
    assert capsys.readouterr().out == (
        "step  3/10  loss 1.2346  lr 3.00e-04  grad norm 0.50  250 ms  4,000 tokens/s  "
        "3.00 MiB resident\n"
    )


def test_no_norm_is_said_without_clipping(capsys):
    make_reporter(10, 0, is_first=True).step(report(gradient_norm=None))
    assert "grad norm" not in capsys.readouterr().out


def test_other_ranks_are_silent(capsys):
    reporter = make_reporter(10, 0, is_first=False)
    reporter.say("hello")
    reporter.step(report())
    reporter.close()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_with_the_same_numbers(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    reporter = make_reporter(10, 2, is_first=True)
    reporter.say("[bold] is text here")
    reporter.step(report())
    reporter.close()
    shown = capsys.readouterr().out
    assert "[bold] is text here" in shown
    assert "loss 1.2346" in shown
    assert "3/10" in shown


def test_memory_on_cpu_is_the_resident_set():
    size, kind = read_memory(torch.device("cpu"))
    assert kind == "resident"
    assert size == pytest.approx(size, abs=1)
    assert size > 50 << 20
