"""Only the URL with the token opens the dashboard."""

import re

import pytest

from tests.browser.conftest import serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def token_server(recorded_runs, free_port, tmp_path_factory):
    """The address of a dashboard that requires a token, and the URL that it printed."""
    log = tmp_path_factory.mktemp("token-server") / "log"
    with serve(recorded_runs, free_port(), log, "--token") as address:
        yield address, re.search(r"http://\S+[?]token=\S+", log.read_text())[0]


def test_the_printed_url_opens_the_dashboard_and_leaves_the_address(token_server, tab):
    address, url = token_server
    dashboard = tab(address)
    dashboard.page.goto(url)
    dashboard.page.wait_for_url(f"{address}/**")
    dashboard.page.wait_for_selector(".st-key-headline")
    dashboard.settle()
    assert "token" not in dashboard.page.url
    cookies = dashboard.page.context.cookies(address)
    name = f"fsdp-inspect-token-{address.rpartition(':')[2]}"  # other servers have their own
    (cookie,) = (found for found in cookies if found["name"] == name)
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert dashboard.page.evaluate("() => document.cookie").find("fsdp-inspect-token") == -1


def test_pages_links_and_downloads_need_no_token_in_the_address(token_server, tab):
    address, url = token_server
    dashboard = tab(address)
    dashboard.page.goto(f"{url}&run=anything")
    dashboard.page.wait_for_selector(".st-key-headline")
    for name in ("overview", "timeline", "units", "memory"):
        dashboard.load(name)
        assert dashboard.headline()
    dashboard.load("overview")
    export = dashboard.page.get_by_test_id("stPopover").filter(has_text="Export")
    export.get_by_role("button").click()
    with dashboard.page.expect_download() as started:
        dashboard.page.get_by_role("button", name="Report (HTML, one file)").click()
    assert started.value.path().stat().st_size > 0


def test_without_the_token_the_browser_shows_one_sentence(token_server, open_context):
    address, _ = token_server
    page = open_context().new_page()
    answer = page.goto(f"{address}/overview")
    assert answer.status == 403
    assert page.inner_text("body").startswith("The dashboard requires its token: open the URL")


def test_a_link_of_another_site_opens_the_dashboard_for_who_has_the_cookie(
    token_server, open_context
):
    address, url = token_server
    context = open_context()
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(".st-key-headline")
    context.route(
        "http://other.example/*",
        lambda route: route.fulfill(
            content_type="text/html", body=f"<a href='{address}/overview'>runs</a>"
        ),
    )
    page.goto("http://other.example/")
    page.click("a")
    page.wait_for_selector(".st-key-headline")
    assert page.url.startswith(f"{address}/overview")
    context.clear_cookies()
    page.goto("http://other.example/")
    page.click("a")
    page.wait_for_selector("text=requires its token")
