"""No text of a run, an address or another site is executed."""

import http.client
import json
import shutil

import pytest
from fsdp_inspect_app.pages import SECTIONS

from tests.browser.conftest import SAMPLES, serve
from tests.browser.states import HOSTILE

pytestmark = pytest.mark.browser

PAGES = [page.name for section in SECTIONS.values() for page in section]


@pytest.fixture
def dialogs(states_server, tab):
    """The dialogs that the page requested from the browser."""
    opened = []
    page = tab(states_server).page

    def note(dialog):
        opened.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    yield opened
    page.remove_listener("dialog", note)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_names_from_a_run_are_text_on_every_page(states_server, tab, dialogs, name):
    dashboard = tab(states_server)
    dashboard.go("" if name == "runs" else name, run="hostile")
    check_harmless(dashboard.page, dialogs)
    if name in ("overview", "timeline", "units"):
        shown = dashboard.page.get_by_test_id("stMain").inner_text()
        assert HOSTILE in shown.replace("\N{WORD JOINER}", "")


@pytest.mark.slow
def test_names_from_a_run_are_text_on_the_page_of_one_unit(states_server, tab, dialogs):
    dashboard = tab(states_server)
    dashboard.open("units", run="hostile", unit=HOSTILE)
    shown = dashboard.page.get_by_test_id("stMain").inner_text().replace("\N{WORD JOINER}", "")
    assert HOSTILE in shown
    check_harmless(dashboard.page, dialogs)


@pytest.mark.slow
@pytest.mark.parametrize("value", [HOSTILE, "../../etc/passwd", "/etc/passwd", "a\0b"])
def test_an_address_is_neither_obeyed_nor_repeated_as_markup(states_server, tab, dialogs, value):
    dashboard = tab(states_server)
    for name in ("", "overview", "units"):
        dashboard.load(name, run=value, unit=value, search=value, pin=value, bars=value)
        check_harmless(dashboard.page, dialogs)
        assert "root:" not in dashboard.page.get_by_test_id("stMain").inner_text()


def check_harmless(page, dialogs):
    """Check that no dialog opened, and that no name became an element."""
    assert dialogs == []
    assert page.locator("img[src='x'], script:text('alert')").count() == 0
    assert page.locator("a[href^='javascript']").count() == 0


def test_a_text_of_a_file_loads_nothing_and_the_page_may_load_nothing_foreign(
    tmp_path, open_context, free_port
):
    folder = tmp_path / "runs"
    shutil.copytree(SAMPLES / "tiny-2-ranks", folder / "run")
    for rank in (0, 1):
        record = folder / "run" / "attempt-000" / f"rank-{rank:05d}" / "rank.json"
        fields = json.loads(record.read_text())
        fields.pop("crc32")
        fields["memory_from"] += "![m](http://127.0.0.1:9/leak)"
        record.write_text(json.dumps(fields))
    context = open_context()
    page = context.new_page()
    asked, refused = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: refused.append(message.text))
    with serve(folder, free_port(), tmp_path / "log") as address:
        page.goto(f"{address}/overview?run=run")
        page.get_by_text("/leak)").first.wait_for(state="attached", timeout=60_000)
        assert page.locator("img[src*='leak']").count() == 0
        page.evaluate("(new Image()).src = 'http://127.0.0.1:9/x'")
        page.wait_for_timeout(500)
    assert all("leak" not in url for url in asked)
    violations = [text for text in refused if "Content Security Policy" in text]
    assert len(violations) == 1
    assert "127.0.0.1:9/x" in violations[0]
    context.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Origin": "http://127.0.0.1:{port}"}, 101, id="this machine"),
        pytest.param({"Host": "evil.example:{port}"}, 403, id="another host"),
        pytest.param({"Origin": "http://evil.example"}, 403, id="another site"),
        pytest.param({}, 403, id="no origin"),
    ],
)
def test_runs_are_served_only_under_the_names_of_this_machine(server, headers, status):
    port = int(server.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    asked = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        **{name: value.format(port=port) for name, value in headers.items()},
    }
    connection.request("GET", "/_stcore/stream", headers=asked)
    assert connection.getresponse().status == status
    connection.close()
