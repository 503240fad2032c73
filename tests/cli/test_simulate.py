import json
from pathlib import Path

import pytest

from fsdp_inspect.trace.plan import Plan

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny-2-ranks"


def test_a_prediction_says_by_how_much_with_its_interval_and_the_replays_error(invoke):
    ended = invoke("simulate", SAMPLE, "--wrap", "every:2")
    assert ended.code == 0
    assert ended.out.startswith("Cannot tell whether steps get shorter: this plan saves up to ")
    assert "Predicted step time: " in ended.out
    assert "Self-check: the recorded plan is simulated at" in ended.out
    assert "layers.0, layers.1" in ended.out


def test_the_recorded_plan_changes_nothing(invoke):
    result = json.loads(invoke("simulate", SAMPLE, "--json").out)
    assert list(result)[:3] == ["run_id", "source", "notes"]
    assert result["change"] == 0
    assert abs(result["replay_error"]) < 0.05
    assert sum(result["predicted"]["parts_ns"].values()) == result["predicted"]["step_time_ns"]


def test_exposed_communication_is_a_part_of_communication_and_of_the_step(invoke):
    sample = SAMPLE.with_name("hsdp-4-ranks")
    plan = json.loads(invoke("simulate", sample, "--json").out)["predicted"]
    parts = plan["parts_ns"]
    exposed = [ns for name, ns in parts.items() if name.startswith("exposed_")]
    assert parts["late_ranks"] == plan["causes_ns"]["straggler"] > 0
    assert sum(exposed) + parts["late_ranks"] == plan["exposed_ns"] <= plan["communication_ns"]
    assert sum(parts.values()) == plan["step_time_ns"]
    assert "waits for late ranks" in invoke("simulate", sample).out


def test_blocks_that_stay_unsharded_are_gathered_once(invoke):
    options = ("--reshard-after-forward", "false", "--json")
    result = json.loads(invoke("simulate", SAMPLE, *options).out)
    blocks = [unit for unit in result["predicted"]["units"] if unit["fqn"].startswith("layers")]
    assert [unit["gathers_per_step"] for unit in blocks] == [1] * len(blocks)
    assert result["change"] < 0


def test_a_faster_network_exposes_less(invoke):
    slow, fast = (
        json.loads(
            invoke("simulate", SAMPLE, "--bandwidth", rate, "--latency", "10us", "--json").out
        )["predicted"]["exposed_ns"]
        for rate in ("100MB/s", "10GB/s")
    )
    assert fast < slow / 10


def test_the_simulated_plan_can_be_written_and_simulated_again(invoke, tmp_path):
    file = tmp_path / "plan.toml"
    first = invoke("simulate", SAMPLE, "--wrap", "every:3", "--write-plan", file, "--json")
    assert "layers.0, layers.1, layers.2" in Plan.load(file).unit_names
    again = invoke("simulate", SAMPLE, "--plan", file, "--json")
    assert json.loads(again.out)["predicted"] == json.loads(first.out)["predicted"]


def test_a_plan_is_not_written_over_a_file(invoke, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text("mine")
    ended = invoke("simulate", SAMPLE, "--write-plan", file)
    assert ended.code == 2
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--bandwidth", "fast"), "50GB/s"),
        (("--latency", "3"), "20us"),
        (("--reshard-after-forward", "maybe"), "true, false"),
        (("--param-dtype", "bf16"), "bfloat16"),
        (("--checkpointing", "selective"), "none, full"),
        (("--node-bandwidth", "0GB/s"), "above 0"),
        (("--node-latency", "soon"), "30us"),
    ],
)
def test_a_value_that_is_none_is_refused_with_what_is_expected(invoke, options, expected):
    ended = invoke("simulate", SAMPLE, *options)
    assert ended.code == 2
    assert expected in ended.err


def test_a_wrap_policy_that_does_not_exist_is_refused(invoke):
    ended = invoke("simulate", SAMPLE, "--wrap", "layers")
    assert ended.code == 2
    assert "every:N" in ended.err


def test_a_run_without_a_plan_is_refused(invoke, runs_folder):
    ended = invoke("simulate", runs_folder / "steady")
    assert ended.code == 1
    assert "no observed plan" in ended.err


def test_checkpointing_costs_time_and_saves_memory(invoke):
    result = json.loads(invoke("simulate", SAMPLE, "--checkpointing", "full", "--json").out)
    assert result["change"] > 0.05
    assert result["predicted"]["peak_bytes"] < 0.6 * result["replayed"]["peak_bytes"]
    assert result["memory_refusal"] is None
    assert len(result["plan"]["checkpointing"]["full"]) == 6


def test_groups_whose_link_the_run_does_not_tell_need_it_to_be_given(invoke):
    options = ("--world-size", "6", "--reshard-after-forward", "3")
    refused = invoke("simulate", SAMPLE, *options)
    assert refused.code == 1
    assert "--node-bandwidth and --node-latency" in refused.err
    link = ("--node-bandwidth", "100GB/s", "--node-latency", "10us", "--json")
    result = json.loads(invoke("simulate", SAMPLE, *options, *link).out)
    assert result["plan"]["units"][1]["reshard_after_forward"] == 3
