"""With a login, no run is shown before it."""

import pytest
from fsdp_inspect_app.guard import may_enter
from streamlit.testing.v1 import AppTest

from tests.app.conftest import PATIENCE_S, SCRIPT

AUTH = {
    "redirect_uri": "http://localhost:8501/oauth2callback",
    "cookie_secret": "not a real one",
    "client_id": "id",
    "client_secret": "not a real one",
    "server_metadata_url": "http://127.0.0.1:9/.well-known/openid-configuration",
}


def _refuse_to_read():
    raise AssertionError("the list of runs was read")


@pytest.mark.parametrize("page", ["runs", "overview", "units"])
def test_before_the_login_no_page_shows_anything_of_a_run(runs_folder, monkeypatch, page):
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(runs_folder)])
    monkeypatch.setattr("fsdp_inspect_app.loading.list_entries", _refuse_to_read)
    app = AppTest.from_file(str(SCRIPT), default_timeout=PATIENCE_S)
    app.secrets["auth"] = AUTH
    app.query_params["run"] = "whole"
    app.switch_page(f"app_pages/{page}/{page}.py").run()
    assert not app.exception
    assert [button.label for button in app.button] == ["Log in"]
    assert len(app.title) == 1
    assert len(app.markdown) == 0
    assert len(app.dataframe) == len(app.selectbox) == len(app.metric) == 0


@pytest.mark.parametrize(
    ("user", "access", "expected"),
    [
        pytest.param({"email": "ada@example.org"}, {}, True, id="no list"),
        pytest.param(
            {"email": "Ada@Example.org"}, {"emails": ["ada@example.org"]}, True, id="name"
        ),
        pytest.param(
            {"email": "bob@example.org"}, {"emails": ["ada@example.org"]}, False, id="other"
        ),
        pytest.param({"email": "bob@example.org"}, {"domains": ["example.org"]}, True, id="domain"),
        pytest.param(
            {"email": "bob@evil.example.org"}, {"domains": ["example.org"]}, False, id="sub"
        ),
        pytest.param({}, {"domains": [""], "emails": [""]}, False, id="no email"),
        pytest.param(
            {"email": "ada@example.org", "email_verified": False},
            {"emails": ["ada@example.org"]},
            False,
            id="unverified",
        ),
    ],
)
def test_only_those_whom_the_list_names_may_enter(user, access, expected):
    assert may_enter(user, access) is expected
