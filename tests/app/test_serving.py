"""Does the server load what pages need, and nothing that only a page may?"""

import subprocess
import sys

from fsdp_inspect_app import serving


def test_everything_that_is_loaded_ahead_exists():
    code = (
        "import sys; from fsdp_inspect_app.serving import load_ahead as a; a(); print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert set(serving._NEEDED) <= set(loaded)
    assert "torch" not in loaded
    assert "fsdp_inspect_app.timeline.component" not in loaded  # registers itself with a server


def test_what_cannot_be_loaded_is_left_to_the_pages(monkeypatch):
    monkeypatch.setattr(serving, "_NEEDED", ("no_such_module", "json"))
    serving.load_ahead()


def test_it_is_streamlits_own_server():
    said = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect_app.serving", "run", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert "streamlit run" in said
    assert "--server.port" in said
