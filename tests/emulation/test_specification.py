"""The values of `--emulate`, and the link of each process group."""

import pytest

from fsdp_inspect.emulation.network import Link, parse_specification
from fsdp_inspect.errors import ConfigError
from fsdp_inspect.hardware import GPUS
from fsdp_inspect.quantities import parse_bytes_per_s, parse_time_ns
from fsdp_inspect.trace.links import PRESETS


def test_a_specification_is_world_size_bandwidth_and_latency():
    specification = parse_specification("world_size=64, bandwidth=50GB/s, latency=20us")

    assert specification.world_size == specification.gpus_per_node == 64
    assert specification.intra == Link(50e9, 20_000)
    assert specification.inter is None


def test_a_preset_is_one_node_unless_a_world_size_is_given():
    assert parse_specification("h100-nvlink").world_size == 8
    assert parse_specification("h200-ib400,world_size=64").world_size == 64


def test_keys_override_the_figures_of_a_preset():
    specification = parse_specification("h200-ib400,world_size=16,inter_bandwidth=25GB/s")

    assert specification.preset == "h200-ib400"
    assert specification.inter == Link(25e9, PRESETS["h200-ib400"].inter[1])


def test_every_preset_says_where_its_figures_come_from():
    assert all("https://" in preset.source for preset in PRESETS.values())
    assert {"h100-nvlink", "h200-ib400", "a100-eth100", "rtx4090-pcie"} < set(PRESETS) == set(GPUS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50GB/s", 50e9),
        ("400Gbit/s", 50e9),
        ("400Gb/s", 50e9),
        ("1GiB/s", 2**30),
        ("1.5e3 B/s", 1500.0),
        ("50GB", None),
        ("fast", None),
        ("1.2.3GB/s", None),
    ],
)
def test_bandwidths_have_units(text: str, value: float | None):
    assert parse_bytes_per_s(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("20us", 20_000), ("1.5 ms", 1_500_000), ("20", None), ("soon", None)]
)
def test_times_have_units(text: str, value: int | None):
    assert parse_time_ns(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("world_size=64", ["bandwidth is missing", "bandwidth=50GB/s"]),
        ("bandwidth=1GB/s", ["world_size is missing"]),
        ("world_size=0,bandwidth=1GB/s", ["world_size is '0'", "from 1"]),
        ("world_size=8,bandwith=1GB/s", ["'bandwith'", "Nearest: 'bandwidth'"]),
        ("h100-nvlnk", ["'h100-nvlnk'", "Nearest: 'h100-nvlink'"]),
        ("world_size=8,bandwidth=1", ["bandwidth is '1'", "400Gbit/s"]),
        ("world_size=8,bandwidth=0GB/s", ["above 0"]),
        ("world_size=8,bandwidth=1GB/s,latency=20", ["latency is '20'", "20us"]),
        ("h100-nvlink,world_size=64", ["64 ranks do not fit", "inter_bandwidth", "h200-ib400"]),
        ("world_size=8,world_size=9,bandwidth=1GB/s", ["world_size twice"]),
        ("world_size=8,bandwidth=1GB/s,inter_latency=1us", ["no inter_bandwidth"]),
    ],
)
def test_a_refusal_says_what_is_wrong_what_is_legal_and_what_to_do(text: str, words: list[str]):
    with pytest.raises(ConfigError) as refused:
        parse_specification(text)

    assert all(word in str(refused.value) for word in [text, *words])


def test_a_group_inside_a_node_does_not_touch_the_network():
    specification = parse_specification("h200-ib400,world_size=16")

    assert specification.link_of(range(8, 16)) == specification.intra


def test_a_group_over_nodes_adds_up_the_cards_of_its_ranks():
    specification = parse_specification("h200-ib400,world_size=64")

    assert specification.link_of([0, 8, 16, 24]).bandwidth_bytes_per_s == 47e9
    assert specification.link_of([0, 1, 8, 9]).bandwidth_bytes_per_s == 94e9


def test_a_group_of_whole_nodes_is_no_faster_than_the_link_within_them():
    specification = parse_specification("h200-ib400,world_size=64")

    assert specification.link_of(range(64)).bandwidth_bytes_per_s == 350e9
