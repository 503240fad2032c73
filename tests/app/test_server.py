"""The server loads the modules of pages, except modules that only a page may load."""

import subprocess
import sys

from fsdp_inspect_app import server as serving


def test_what_is_loaded_ahead_exists_and_is_not_searched_for_garbage_after_every_script():
    code = (
        "import gc, sys; from fsdp_inspect_app.server import load_ahead; load_ahead(); "
        "print(len(gc.get_objects()), gc.get_freeze_count(), *sys.modules)"
    )
    searched, kept, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()
    assert int(searched) < int(kept) / 50
    assert set(serving._NEEDED) <= set(loaded)
    assert "torch" not in loaded
    assert "fsdp_inspect_app.timeline.component" not in loaded  # registers itself with a server


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
