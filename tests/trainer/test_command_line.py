import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fsdp_inspect.errors import ConfigError
from instrumented_trainer.command_line import check_settings, parse_command, render_config
from instrumented_trainer.config import TrainerConfig, legal_values, meaning_of


def parse(*arguments: str) -> TrainerConfig:
    return parse_command(arguments).config


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_command(arguments)
    return str(refused.value)


def test_no_arguments_give_the_defaults():
    assert parse() == TrainerConfig()


def test_values_are_read_as_what_the_setting_is():
    config = parse("--steps", "7", "--lr", "3e-4", "--tag", "a, b", "--hf-config", '{"n": [1]}')
    assert (config.steps, config.lr, config.tag) == (7, 3e-4, ("a", "b"))
    assert config.hf_config == {"n": [1]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--compile",), True),
        (("--compile", "true"), True),
        (("--compile=false",), False),
        (("--no-compile",), False),
        (("--compile", "--no-compile"), False),
    ],
)
def test_a_flag_has_a_positive_a_negative_and_a_spelled_out_form(arguments, expected):
    assert parse(*arguments).compile is expected


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 5\n[sharding]\nwrap = "every:2"\nmesh = 2\n')
    config = parse("--config", str(path), "--steps", "9")
    assert (config.steps, config.wrap, config.mesh) == (9, "every:2", "2")


def test_lists_and_tables_of_the_file_read_like_their_short_forms(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'wrap = ["layers.*", ["norm", "lm_head"]]\nmemory_steps = [5, 9]\ntag = ["a"]\n'
        'reshard_after_forward = { default = true, "layers.7" = false, "norm, lm_head" = 2 }\n'
    )
    config = parse("--config", str(path))
    assert config.wrap == "layers.*; norm, lm_head"
    assert config.reshard_after_forward == "true; layers.7=false; norm, lm_head=2"
    assert config.memory_steps == "5,9"


def test_printed_settings_read_back_as_the_same_settings(tmp_path):
    arguments = ("--compile", "--tag", "a,b", "--hf-config", '{"a": {"b": 1}}', "--lr", "1e-5")
    path = tmp_path / "run.toml"
    text = parse_command(("--print-config", *arguments)).text
    assert text is not None
    path.write_text(text)
    assert parse("--config", str(path)) == parse(*arguments)


def test_printed_settings_lie_in_their_sections_with_their_meaning():
    text = render_config(TrainerConfig())
    assert tomllib.loads(text)["training"]["steps"] == 30
    assert "# Optimizer steps, counted from the start. (a whole number above 0)\nsteps = 30" in text


def test_help_names_every_setting_with_its_meaning_legal_values_and_default():
    text = parse_command(["--help"]).text
    assert text is not None
    words = " ".join(text.split())
    for name, field in TrainerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')} " in words
        first_word = meaning_of(name).split()[0]
        assert first_word in words
        assert legal_values(name).split()[0] in words, field
    assert "default: 30" in words


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stepz", "3"], "Unknown setting '--stepz'. Nearest: '--steps'."),
        (["--step", "3"], "Unknown setting '--step'. Nearest: '--steps'."),
        (["--steps"], "Argument --steps: expected one argument."),
        (["fast"], "Unexpected argument 'fast'. Expected settings as --key value."),
        (["--steps", "0"], "steps is '0'. Expected greater than 0. Legal values of steps: a whole"),
        (["--preset", "big"], "preset is 'big'. Expected 'tiny', 'small', 'llama-1b',"),
        (["--lr", "quick"], "Legal values of lr: a number above 0."),
        (["--compile", "maybe"], "Legal values of compile: true, false."),
        (["--hf-config", "{"], "hf_config is '{': invalid JSON"),
        (["--config", "absent.toml"], "The settings file 'absent.toml' cannot be read"),
    ],
)
def test_a_bad_command_line_is_refused_with_what_is_legal(arguments, complaint):
    assert complaint in refusal(*arguments)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("stps = 3", "sets 'stps', which is an unknown setting. Nearest: 'steps'."),
        (
            "[sharding]\nwarp = 'root'",
            "sets 'warp' in [sharding], which is an unknown setting. Nearest: '",
        ),
        (
            "[trainning]\nsteps = 3",
            "sets 'trainning', which is an unknown setting. Nearest: 'training'.",
        ),
        ("[training]\nlr = 3", "sets 'lr' in [training]. Expected it in [optimizer]"),
        ("training = 3", "sets 'training', which is an unknown setting."),
        ("steps = ]", "invalid TOML:"),
        ("steps = true", "steps is True. Expected a whole number above 0."),
    ],
)
def test_a_bad_file_is_refused_with_the_nearest_key(tmp_path, text, complaint):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert complaint in refusal("--config", str(path))


def test_settings_from_python_are_checked_alike():
    assert check_settings({"steps": 3}).steps == 3
    with pytest.raises(ConfigError, match=r"There is no key 'stepz'. Nearest: 'steps'"):
        check_settings({"stepz": 3})


def test_help_comes_without_torch():
    code = (
        "import sys; from instrumented_trainer.__main__ import main; main(['--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m instrumented_trainer")


def test_the_trainer_is_a_program(tmp_path: Path):
    command = [sys.executable, "-m", "instrumented_trainer", "--preset", "huge"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("instrumented_trainer: preset is 'huge'. Expected 'tiny'")
    assert done.stderr.count("\n") == 1
