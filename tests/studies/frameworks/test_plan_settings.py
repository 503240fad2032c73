"""The files of a capacity plan have the field names of the installed frameworks."""

from dataclasses import fields, replace

import pytest

from fsdp_inspect.report.planning import accelerate_settings, torchtitan_settings
from fsdp_inspect.simulation.planning.candidates import Candidate, Job
from fsdp_inspect.simulation.planning.transformer import load_model

pytestmark = pytest.mark.frameworks
CANDIDATE = Candidate(replicas=2, tensor_parallel=2)


def make_job() -> Job:
    model, _ = load_model("tiny")
    return Job(model=replace(model), gpus=16, gpus_per_node=8, seq_len=64, tokens=1e9)


def test_torchtitan_has_every_option_of_a_plan():
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig

    settings = torchtitan_settings(make_job(), CANDIDATE)
    for section, config in (("training", TrainingConfig), ("parallelism", ParallelismConfig)):
        assert set(settings[section]) <= {field.name for field in fields(config)}
        config(**settings[section])


def test_accelerate_reads_every_setting_of_a_plan(tmp_path):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    settings = accelerate_settings(make_job(), CANDIDATE)
    known = {field.name for field in fields(ClusterConfig)}
    assert set(settings) <= known | {"compute_environment", "mixed_precision", "distributed_type"}
    options = {action.dest for action in launch_command_parser()._actions}
    nested = {*settings["fsdp_config"], *settings["parallelism_config"]}
    assert nested <= options
