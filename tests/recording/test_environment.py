import os
import platform
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from fsdp_inspect.recording import environment
from fsdp_inspect.recording.environment import (
    MASK,
    describe_command,
    describe_environment,
    find_commit,
    find_script_commit,
    mask_secrets,
    read_clock_pair,
    select_variables,
)

# --- the command line


@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        pytest.param(["--token", "abc"], ["--token", MASK], id="option and value"),
        pytest.param(["--hf_token", "-abc"], ["--hf_token", MASK], id="value with a dash"),
        pytest.param(["--api-key=abc"], [f"--api-key={MASK}"], id="option=value"),
        pytest.param(["--accessToken", "abc"], ["--accessToken", MASK], id="camel case"),
        pytest.param(["wandb.api_key=abc"], [f"wandb.api_key={MASK}"], id="override"),
        pytest.param(["--set=hub.token=abc"], [f"--set=hub.token={MASK}"], id="nested"),
        pytest.param(
            ['{"password": "abc", "lr": 1}'], [f'{{"password": "{MASK}", "lr": 1}}'], id="json"
        ),
        pytest.param(
            ["https://me:abc@host/data?token=abc&part=2"],
            [f"https://{MASK}@host/data?token={MASK}&part=2"],
            id="url",
        ),
        pytest.param(["--header", "X: Bearer abc"], ["--header", f"X: Bearer {MASK}"], id="header"),
        pytest.param(["hf_" + 12 * "a"], [MASK], id="known token anywhere"),
        pytest.param(["--password", "--steps", "3"], ["--password", "--steps", "3"], id="prompt"),
    ],
)
def test_secret_in_a_command_line_is_masked(arguments, stored):
    assert describe_command(["python", *arguments])[1:] == stored


@pytest.mark.parametrize(
    "argument",
    [
        "--tokenizer=gpt2",
        "--max-tokens=4096",
        "--token-dim=64",
        "--key=value",
        "--auth-token-file=/secure/token",
        "s3://bucket/data",
        "model.layers=12",
        "-m",
    ],
)
def test_argument_that_only_sounds_like_a_secret_is_kept(argument):
    assert describe_command(["python", argument]) == ["python", argument]


def test_value_after_an_option_that_only_sounds_like_a_secret_is_kept():
    assert describe_command(["python", "--tokenizer", "gpt2"])[2] == "gpt2"


def test_interpreter_is_named_without_its_folder():
    assert describe_command(["/home/me/venv/bin/python3", "train.py"]) == ["python3", "train.py"]


@given(st.text(alphabet="abcdefghijklmnop0123456789+/", min_size=6))
def test_no_secret_value_survives_masking(secret):
    given_forms = ["--token", f"x{secret}", f"--api-key=x{secret}", f"hub.password=x{secret}"]
    assert f"x{secret}" not in " ".join(describe_command(["python", *given_forms]))


@given(st.text())
def test_masking_twice_changes_nothing_more(text):
    once = mask_secrets(text)
    assert mask_secrets(once) == once


# --- environment variables


def test_variables_that_change_a_step_are_kept_and_others_are_not():
    variables = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "1",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HOME": "/home/me",
        "WANDB_API_KEY": "abc",
        "CUDA_HOME": "/usr/local/cuda",
    }
    assert [*select_variables(variables)] == [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "PYTORCH_ALLOC_CONF",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ]


def test_secret_in_a_variable_that_is_kept_is_masked():
    kept = select_variables({"NCCL_AUTH_TOKEN": "abc", "TORCH_PROXY": "http://me:abc@proxy"})
    assert kept == {"NCCL_AUTH_TOKEN": MASK, "TORCH_PROXY": f"http://{MASK}@proxy"}


# --- git


def git(folder, *arguments):
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_GIT_TIMEOUT_S", 500)  # the machine may be busy
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("pass\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_commit_is_the_full_hash_also_when_it_has_a_tag(repository):
    git(repository, "tag", "v1")
    assert find_commit(repository) == git(repository, "rev-parse", "HEAD")


def test_changed_script_makes_the_commit_dirty(repository):
    (repository / "train.py").write_text("changed\n")
    assert find_commit(repository) == git(repository, "rev-parse", "HEAD") + "-dirty"


def test_new_files_such_as_the_run_itself_do_not_make_it_dirty(repository):
    (repository / "runs").mkdir()
    (repository / "runs" / "run.json").write_text("{}")
    assert not find_commit(repository).endswith("-dirty")


def test_folder_without_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert find_commit(tmp_path) is None


def test_repository_without_commit_has_none(tmp_path):
    git(tmp_path, "init", "--quiet")
    assert find_commit(tmp_path) is None


def test_machine_without_git_has_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert find_commit(repository) is None


def test_git_that_hangs_is_given_up(repository, monkeypatch):
    slow = repository / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 500\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "_GIT_TIMEOUT_S", 0.1)
    begin = time.monotonic()
    assert find_commit(repository) is None
    assert time.monotonic() - begin < 250


# --- the whole


def test_environment_names_the_versions_that_are_there():
    versions = describe_environment().versions
    assert versions["torch"] == torch.__version__
    assert versions["python"] == platform.python_version()
    assert {"fsdp_inspect", "numpy"} <= set(versions)
    assert ("cuda" in versions) == (torch.version.cuda is not None)
    assert all(versions.values())


def test_environment_on_cpu_names_the_processor():
    assert describe_environment("cpu").device_name


def test_command_is_the_one_that_started_python():
    described = describe_environment()
    assert len(described.command) == len(sys.orig_argv)


def test_commit_is_that_of_the_training_script(repository, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py"), "--steps", "3"])
    assert find_script_commit() == git(repository, "rev-parse", "HEAD")


# --- clocks


def test_clock_pair_ties_the_two_clocks_of_one_moment():
    before = time.perf_counter_ns(), time.time_ns()
    pair = read_clock_pair()
    after = time.perf_counter_ns(), time.time_ns()
    assert before[0] <= pair.monotonic_ns <= after[0]
    assert before[1] <= pair.unix_ns <= after[1]


def test_clock_pair_is_the_tightest_of_several_readings(monkeypatch):
    monotonic = iter([0, 900, 1000, 1040, 2000, 2500])
    monkeypatch.setattr(environment, "_CLOCK_READINGS", 3)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(monotonic))
    pair = read_clock_pair()
    assert (pair.monotonic_ns, pair.uncertainty_ns) == (1020, 20)


def test_gradient_hooks_of_a_script_are_a_setting_also_if_there_are_none() -> None:
    model = nn.Linear(2, 2)
    observe = partial(environment.observe_settings, model, [], "", "", skips_reduction=False)
    assert observe()["gradient_hooks"] == ""
    model.weight.register_hook(lambda gradient: gradient / 2)
    assert observe()["gradient_hooks"] == "1 parameter"


@pytest.mark.parametrize(
    ("num_repeated", "backwards", "said"),
    [
        (0, {1: 1}, "none"),
        (3, {1: 1}, "3 forwards a backward"),
        (24, {2: 4}, "3 forwards a backward"),
        (1, {4: 1}, "1 forward a backward"),
    ],
)
def test_recomputation_is_described_by_its_number(num_repeated, backwards, said) -> None:
    assert environment.describe_recomputation(num_repeated, backwards) == said
