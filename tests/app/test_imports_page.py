"""The Import page lists the files of the folder and links to the run that it makes."""

import time

import pytest

from tests.app.test_pages import codes_of, read
from tests.importing.kineto_traces import TraceWriter, fsdp2_step


@pytest.fixture
def folder(tmp_path):
    trace = TraceWriter()
    fsdp2_step(trace)
    for name in ("a.json", "b.json"):
        trace.write(tmp_path / name)
    return tmp_path


def until(app, text, timeout_s=500):
    deadline = time.monotonic() + timeout_s
    while text not in shown_by(app):
        assert time.monotonic() < deadline, shown_by(app)
        time.sleep(0.2)
        app.run()
    assert not app.exception
    return shown_by(app)


def shown_by(app):
    more = [element.value for element in (*app.success, *app.error)]
    return read(app) + "\n".join(more).replace("\\", "")


def test_a_folder_without_traces_says_where_it_looked_and_how_to_make_one(open_app, tmp_path):
    app = open_app(tmp_path, "imports")
    assert not app.exception
    assert "This folder has nothing to import." in read(app)
    assert "export_chrome_trace" in codes_of(app)[0]


def test_an_import_goes_on_and_leads_to_its_run(open_app, folder):
    app = open_app(folder, "imports", source="b.json")
    assert "2 profiler traces can become runs." in read(app)
    assert app.selectbox(key="import source").value == "b.json"
    app.text_input(key="import name").set_value("second").run()
    next(button for button in app.button if button.label == "Import").click().run()
    text = until(app, "is now the run")
    assert "`b.json` is now the run `imported/second`" in text
    assert (folder / "imported" / "second" / "run.json").exists()


@pytest.mark.parametrize("source", ["../b.json", "/etc/passwd", "c.json", "b.json\0"])
def test_a_link_names_nothing_but_entries_of_the_listing(open_app, folder, source):
    app = open_app(folder, "imports", source=source)
    assert not app.exception
    assert app.query_params["source"] == "a.json"


def test_what_is_gone_by_now_is_not_imported(open_app, folder):
    app = open_app(folder, "imports", source="b.json")
    (folder / "b.json").unlink()
    next(button for button in app.button if button.label == "Import").click().run()
    assert "'b.json' not found: the file was removed." in shown_by(app)
