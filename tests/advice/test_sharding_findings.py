"""A sharded model that fits one device: the gain of DDP, or the reason why it is unknown."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from fsdp_inspect.advice.findings import find_other_sharders
from fsdp_inspect.analysis.memory.sharding_worth import ReplicationSaving, measure_whole_memory
from fsdp_inspect.analysis.verdict import Limit
from tests.analysis.memory.test_sharding_worth import PEAK
from tests.builders import steady_run

KNOWN = ReplicationSaving(low_ns=10, high_ns=40, exposed_ns=60, all_reduce_ns=50, reason="")
UNKNOWN = ReplicationSaving(None, None, 60, None, "the run gathers in another dtype")


def find(
    saving: ReplicationSaving,
    *,
    device_bytes: int = 1 << 30,
    limit: str = "communication",
    frameworks: Sequence[str] = (),
):
    manifest = steady_run().manifest
    code = manifest.code.model_copy(update={"frameworks": list(frameworks)})
    evidence = SimpleNamespace(
        manifest=manifest.model_copy(update={"code": code}),
        whole_memory=measure_whole_memory(manifest, PEAK, device_bytes),
        replication=saving,
        verdict=SimpleNamespace(limit=limit),
        peak_bytes=PEAK.bytes,
        is_worth_naming=lambda ns: ns >= 2,
    )
    return list(find_other_sharders(evidence))


def test_a_model_that_fits_one_device_has_the_saving_as_an_interval() -> None:
    [found] = find(KNOWN)
    assert (found.rule, found.effect.saved_low_ns, found.effect.saved_high_ns) == ("R35", 10, 40)


def test_a_framework_that_shards_is_set_and_not_wrapped_again() -> None:
    [found] = find(KNOWN)
    assert "DistributedDataParallel(model" in found.snippet
    [found] = find(KNOWN, frameworks=["accelerate", "transformers"])
    assert "switch FSDP off in the settings of Transformers" in " ".join(found.do)
    assert not found.snippet


def test_an_unknown_saving_is_said_with_its_reason() -> None:
    [found] = find(UNKNOWN)
    assert found.rule == "R35"
    assert "cannot tell, because the run gathers in another dtype" in found.effect.sentence
    assert (found.effect.saved_low_ns, found.effect.saved_high_ns) == (None, None)


def test_nothing_is_said_of_a_model_that_does_not_fit_or_of_short_memory() -> None:
    assert find(KNOWN, device_bytes=1) == []
    assert find(KNOWN, limit=Limit.MEMORY) == []
    assert find(replace(UNKNOWN, exposed_ns=1)) == []
