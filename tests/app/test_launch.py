"""Does the server start where only this machine reaches it, with nothing sent home?"""

import socket
import subprocess
import sys

import pytest
from fsdp_inspect_app.__main__ import main
from fsdp_inspect_app.launch import describe_exposure, is_loopback, server_command, server_flags


def test_by_default_only_this_machine_is_served_and_only_under_its_own_names():
    flags = server_flags()
    assert "--server.address=127.0.0.1" in flags
    allowed = [flag for flag in flags if flag.startswith("--server.allowedHosts=")]
    assert [flag.partition("=")[2] for flag in allowed] == ["localhost", "127.0.0.1", "[::1]"]


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


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu7", False)],
)
def test_loopback_is_recognised(host, expected):
    assert is_loopback(host) is expected


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
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "there is no folder" in ended.stderr
    assert "nowhere" in ended.stderr


def test_a_proxys_name_is_an_allowed_host_and_origin_of_a_server_that_stays_on_loopback():
    flags = server_flags(proxy_name="runs.example.org")
    assert "--server.address=127.0.0.1" in flags
    assert "--server.allowedHosts=runs.example.org" in flags
    assert "--browser.serverAddress=runs.example.org" in flags
    assert "--client.showErrorDetails=type" in flags


def test_a_server_for_all_addresses_asks_nobody_on_the_internet_for_its_own():
    flags = server_flags(host="0.0.0.0")
    assert f"--browser.serverAddress={socket.gethostname()}" in flags


def test_what_a_served_address_exposes_is_said_with_the_ways_to_put_a_login_in_front(tmp_path):
    said = describe_exposure(tmp_path, host="0.0.0.0", port=8123)
    assert f"reaches port 8123 of this machine sees every run of {str(tmp_path)!r}" in said
    assert "environment variables" in said
    assert "server_metadata_url" in said
    assert "--proxy-name NAME" in said
    assert "ssh -L 8123:127.0.0.1:8123" in said


def test_a_host_that_others_reach_is_announced_before_the_server_starts(monkeypatch, capsys):
    commands = []
    monkeypatch.setattr("os.execv", lambda _, command: commands.append(command))
    main(["--host", "0.0.0.0"])
    assert "Listening on 0.0.0.0" in capsys.readouterr().err
    main([])
    assert capsys.readouterr().err == ""
    assert len(commands) == 2
