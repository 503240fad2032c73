"""A server accepts its own names, origins and token, and refuses all others."""

import os
from types import SimpleNamespace

import pytest

from fsdp_inspect import server_access
from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.server_access import (
    Origin,
    choose_token,
    is_loopback,
    make_access,
    may_have_other_users,
    parse_origin,
    read_bearer,
    server_url,
)

LOCAL = make_access("127.0.0.1", 8501, None, None)
PROXIED = make_access("127.0.0.1", 8501, parse_origin("runs.example.org"), None)


@pytest.mark.parametrize(
    "host", ["localhost:8501", "127.0.0.1:8501", "[::1]:8501", "LOCALHOST:8501"]
)
def test_a_server_on_loopback_accepts_its_own_names_and_port(host):
    assert LOCAL.find_refusal([host], []) == ""


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example:8501"],
        ["localhost:8502"],
        ["localhost"],
        ["localhost.evil.example:8501"],
        ["127.0.0.1:8501@evil.example"],
        [""],
        [],
        ["localhost:8501", "evil.example"],
    ],
)
def test_other_hosts_and_ports_are_refused(hosts):
    assert "The Host of this request" in LOCAL.find_refusal(hosts, [])


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost:8502",
        "https://localhost:8501",
        "http://localhost",
        "null",
        "",
    ],
)
def test_other_origins_are_refused(origin):
    assert "The Origin of this request" in LOCAL.find_refusal(["localhost:8501"], [origin])


def test_a_web_socket_needs_an_origin_and_other_requests_do_not():
    own = "http://localhost:8501"
    assert LOCAL.find_refusal(["localhost:8501"], [own], is_web_socket=True) == ""
    assert "requires an Origin" in LOCAL.find_refusal(["localhost:8501"], [], is_web_socket=True)
    assert LOCAL.find_refusal(["localhost:8501"], []) == ""


@pytest.mark.parametrize("host", ["runs.example.org", "runs.example.org:443", "127.0.0.1:8501"])
def test_a_proxy_may_pass_on_its_own_host_or_the_servers(host):
    assert PROXIED.find_refusal([host], ["https://runs.example.org"]) == ""


def test_the_proxys_name_holds_for_its_own_scheme_and_port_only():
    for origin in ("http://runs.example.org", "https://runs.example.org:8443"):
        assert PROXIED.find_refusal(["runs.example.org"], [origin])
    assert PROXIED.find_refusal(["runs.example.org:8501"], [])


def test_a_server_for_all_addresses_has_the_name_and_addresses_of_the_machine(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Node7")
    monkeypatch.setattr("socket.getfqdn", lambda: "node7.example.org")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.1.2.3", 0))])
    access = make_access("0.0.0.0", 80, None, None)
    assert {"node7", "node7:80", "node7.example.org", "10.1.2.3", "localhost"} <= access.hosts
    assert "http://10.1.2.3" in access.origins


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs.example.org", Origin("https", "runs.example.org", 443)),
        ("runs.example.org:8443", Origin("https", "runs.example.org", 8443)),
        ("http://localhost:9000", Origin("http", "localhost", 9000)),
        ("http://[::1]:9000", Origin("http", "::1", 9000)),
    ],
)
def test_the_origin_of_a_proxy_is_parsed(text, expected):
    assert parse_origin(text) == expected


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "x/path", "x?a", "a@x", "x:99999", "x:port", "https://", "http://[x"]
)
def test_another_form_of_a_proxys_name_is_refused(text):
    with pytest.raises(FsdpInspectError, match="Expected a host name"):
        parse_origin(text)


def test_only_the_token_is_accepted_where_one_is_required():
    access = make_access("127.0.0.1", 8501, None, "s" * 20)
    assert access.accepts_token(["", "s" * 20])
    assert not access.accepts_token(["", "s" * 19, "\xe9", "\ufffd"])
    assert not access.accepts_token([])
    assert LOCAL.accepts_token([])


def test_a_bearer_token_is_read_from_its_header_only():
    assert read_bearer("Bearer abc") == read_bearer("bearer  abc ") == "abc"
    assert read_bearer("Basic abc") == read_bearer("") == ""


def test_the_url_has_an_address_that_a_browser_opens():
    assert server_url("127.0.0.1", 8501, "/", token="abc") == "http://127.0.0.1:8501/?token=abc"
    assert server_url("0.0.0.0", 8501, "/metrics") == "http://127.0.0.1:8501/metrics"
    assert server_url("::1", 80, "/") == "http://[::1]/"
    proxy = parse_origin("runs.example.org")
    assert server_url("127.0.0.1", 8501, "/", proxy=proxy) == "https://runs.example.org/"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu7", False)],
)
def test_loopback_is_recognized(host, expected):
    assert is_loopback(host) is expected


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(server_access, "may_have_other_users", lambda: False)
    monkeypatch.delenv(server_access.TOKEN_VARIABLE, raising=False)


def test_a_user_who_is_alone_needs_no_token_unless_a_host_is_given(alone, monkeypatch):
    assert choose_token(is_wanted=None, is_host_given=False) is None
    assert choose_token(is_wanted=None, is_host_given=True)
    assert choose_token(is_wanted=False, is_host_given=True) is None
    assert choose_token(is_wanted=True, is_host_given=False)
    monkeypatch.setattr(server_access, "may_have_other_users", lambda: True)
    assert choose_token(is_wanted=None, is_host_given=False)


def test_every_server_has_another_token_unless_the_environment_sets_it(alone, monkeypatch):
    made = {choose_token(is_wanted=True, is_host_given=False) for _ in range(3)}
    assert len(made) == 3
    monkeypatch.setenv(server_access.TOKEN_VARIABLE, "fixed-token-of-prometheus")
    assert choose_token(is_wanted=None, is_host_given=False) == "fixed-token-of-prometheus"


@pytest.mark.parametrize("token", ["short", "x" * 20 + " ", "x" * 20 + ";", "é" * 20])
def test_an_unsafe_token_of_the_environment_is_refused_and_not_repeated(alone, monkeypatch, token):
    monkeypatch.setenv(server_access.TOKEN_VARIABLE, token)
    with pytest.raises(FsdpInspectError, match="at least 16") as refused:
        choose_token(is_wanted=True, is_host_given=False)
    assert token not in str(refused.value)


def account(uid, shell="/bin/bash"):
    return SimpleNamespace(pw_uid=uid, pw_shell=shell)


OWN_ACCOUNTS = [account(0), account(1), account(os.getuid()), account(65534)]


@pytest.mark.parametrize(
    ("accounts", "services", "expected"),
    [
        pytest.param(OWN_ACCOUNTS, "files systemd", False, id="alone"),
        pytest.param([*OWN_ACCOUNTS, account(4321)], "files", True, id="another person"),
        pytest.param(
            [*OWN_ACCOUNTS, account(4321, "/usr/sbin/nologin")], "files", False, id="no login"
        ),
        pytest.param([*OWN_ACCOUNTS, account(4321, "")], "files", True, id="default shell"),
        pytest.param(OWN_ACCOUNTS, "files sss", True, id="directory service"),
        pytest.param(OWN_ACCOUNTS, "files [NOTFOUND=return] ldap", True, id="ldap"),
        pytest.param([account(4321, "/bin/false")], "files", True, id="own account missing"),
    ],
)
def test_other_users_are_found_in_the_user_database(
    accounts, services, expected, monkeypatch, tmp_path
):
    switch = tmp_path / "nsswitch.conf"
    switch.write_text(f"# passwd: ldap\npasswd: {services} # local\nhosts: files dns\n")
    has_directory = server_access._has_directory_service
    monkeypatch.setattr("pwd.getpwall", lambda: accounts)
    monkeypatch.setattr(server_access, "_has_directory_service", lambda: has_directory(switch))
    assert may_have_other_users() is expected


def test_a_user_database_that_cannot_be_read_counts_as_other_users(monkeypatch, tmp_path):
    assert server_access._has_directory_service(tmp_path) is True  # a folder
    assert server_access._has_directory_service(tmp_path / "missing") is False

    def fail():
        raise OSError

    monkeypatch.setattr("pwd.getpwall", fail)
    assert may_have_other_users() is True
