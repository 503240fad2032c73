"""The server loads the modules of pages, except modules that only a page may load."""

import subprocess
import sys

from fsdp_inspect_app import server as serving


def printed_after_loading(expression):
    code = (
        "import gc, sys; from fsdp_inspect_app.server import load_ahead; load_ahead(); "
        f"print({expression})"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_everything_that_is_loaded_ahead_exists():
    loaded = printed_after_loading("*sys.modules").split()
    assert set(serving._NEEDED) <= set(loaded)
    assert "torch" not in loaded
    assert "fsdp_inspect_app.timeline.component" not in loaded  # registers itself with a server


def test_what_is_loaded_is_not_searched_for_garbage_after_every_script():
    searched, kept = printed_after_loading("len(gc.get_objects()), gc.get_freeze_count()").split()
    assert int(searched) < int(kept) / 50


def test_what_cannot_be_loaded_is_left_to_the_pages(monkeypatch):
    monkeypatch.setattr(serving, "_NEEDED", ("no_such_module", "json"))
    serving.load_ahead()


def test_it_is_streamlits_own_server():
    said = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect_app.server", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "streamlit run" in said
    assert "--server.port" in said
