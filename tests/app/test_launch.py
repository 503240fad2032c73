"""The server starts on loopback only and sends nothing to other hosts."""

import socket
import subprocess
import sys

import pytest
from fsdp_inspect_app.__main__ import main
from fsdp_inspect_app.launch import (
    describe_exposure,
    pass_access,
    receive_access,
    server_command,
    server_flags,
)

from fsdp_inspect.errors import FsdpInspectError
from fsdp_inspect.server_access import make_access, parse_origin


def test_by_default_only_this_machine_is_served_and_only_under_its_own_names():
    flags = server_flags()
    assert "--server.address=127.0.0.1" in flags
    allowed = [flag for flag in flags if flag.startswith("--server.allowedHosts=")]
    assert [flag.partition("=")[2] for flag in allowed] == ["localhost", "127.0.0.1", "::1"]


def test_protections_are_on_and_statistics_are_off():
    flags = server_flags()
    assert "--server.enableCORS=true" in flags
    assert "--server.enableXsrfProtection=true" in flags
    assert "--browser.gatherUsageStats=false" in flags


def test_strangers_see_no_stack_trace_with_values():
    assert "--client.showErrorDetails=type" in server_flags(host="0.0.0.0")
    assert "--client.showErrorDetails=type" in server_flags()


def test_a_served_address_is_an_allowed_host():
    assert "--server.allowedHosts=10.1.2.3" in server_flags(host="10.1.2.3")


def test_the_folder_follows_the_script_as_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    command = server_command((tmp_path / "runs").relative_to(tmp_path), port=8123)
    assert command[:4] == [sys.executable, "-m", "fsdp_inspect_app.server", "run"]
    assert command[-2:] == ["--", str(tmp_path / "runs")]
    assert "--server.port=8123" in command


def test_without_a_folder_the_samples_are_shown():
    assert "--" not in server_command(None)


def test_a_folder_that_does_not_exist_ends_before_any_server_starts(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "fsdp_inspect_app", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2
    assert "folder not found" in ended.stderr
    assert "nowhere" in ended.stderr


def test_a_proxys_name_is_an_allowed_host_and_origin_of_a_server_that_stays_on_loopback():
    flags = server_flags(proxy=parse_origin("runs.example.org"))
    assert "--server.address=127.0.0.1" in flags
    assert "--server.allowedHosts=runs.example.org" in flags
    assert "--browser.serverAddress=runs.example.org" in flags
    assert "--client.showErrorDetails=type" in flags


def test_a_server_for_all_addresses_asks_nobody_on_the_internet_for_its_own():
    flags = server_flags(host="0.0.0.0")
    assert f"--browser.serverAddress={socket.gethostname()}" in flags


def test_what_a_served_address_exposes_is_said_with_the_ways_to_put_a_login_in_front(tmp_path):
    said = describe_exposure(tmp_path, host="0.0.0.0", port=8123, has_token=False)
    assert (
        f"everyone who reaches port 8123 of this machine sees every run of {str(tmp_path)!r}"
        in said
    )
    assert "environment variables" in said
    assert "server_metadata_url" in said
    assert "--proxy-name NAME" in said
    assert "ssh -L 8123:127.0.0.1:8123" in said
    with_token = describe_exposure(tmp_path, host="0.0.0.0", port=8123, has_token=True)
    assert "everyone who has the token and reaches port 8123" in with_token


@pytest.fixture
def executed(monkeypatch):
    """The commands that `main` would execute; they are not executed."""
    commands = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command))
    monkeypatch.setenv("FSDP_INSPECT_SERVER_ACCESS", "")  # restored afterwards
    return commands


def test_a_host_that_others_reach_is_announced_before_the_server_starts(executed, capsys):
    main(["--host", "0.0.0.0"])
    printed = capsys.readouterr()
    assert "Listening on 0.0.0.0" in printed.err
    assert "http://127.0.0.1:8501/?token=" in printed.out
    main(["--no-token"])
    assert capsys.readouterr().err == ""
    assert len(executed) == 2


def test_the_url_has_the_token_and_the_command_line_has_not(executed, capsys):
    main(["--token", "--port", "8123"])
    token = capsys.readouterr().out.partition("?token=")[2].partition(" ")[0]
    assert len(token) >= 43
    assert token not in " ".join(executed[0])
    assert receive_access().token == token
    main(["--no-token"])
    assert "http://127.0.0.1:8501/ " in capsys.readouterr().out
    assert receive_access().token is None


def test_behind_a_proxy_the_url_is_the_proxys(executed, capsys):
    main(["--token", "--proxy-name", "runs.example.org"])
    assert ": https://runs.example.org/?token=" in capsys.readouterr().out
    access = receive_access()
    assert {"runs.example.org", "127.0.0.1:8501"} <= access.hosts
    assert "https://runs.example.org" in access.origins


def test_an_invalid_proxy_name_ends_before_any_server_starts(executed, capsys):
    with pytest.raises(SystemExit):
        main(["--proxy-name", "ftp://x"])
    assert "Invalid --proxy-name: 'ftp://x'" in capsys.readouterr().err
    assert executed == []


def test_the_accepted_requests_are_received_once(monkeypatch):
    monkeypatch.setenv("FSDP_INSPECT_SERVER_ACCESS", "")
    access = make_access("127.0.0.1", 8501, None, "a" * 16)
    pass_access(access)
    assert receive_access() == access
    with pytest.raises(FsdpInspectError, match="fsdp-inspect app DIR"):
        receive_access()
