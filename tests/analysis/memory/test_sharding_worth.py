"""The memory and the gain of DDP and of FSDP, with explicit numbers."""

from dataclasses import replace

import numpy as np
import pytest

from fsdp_inspect.analysis.memory.fit import FitVerdict
from fsdp_inspect.analysis.memory.peak import CategoryBytes, OwnerBytes, PeakMoment
from fsdp_inspect.analysis.memory.sharding_worth import (
    ReplicationSaving,
    WholeMemory,
    describe_replication_saving,
    measure_replication_saving,
    measure_whole_memory,
)
from fsdp_inspect.trace.codes import NO_UNIT
from fsdp_inspect.trace.sharders import DDP
from tests.builders import steady_run

PEAK = PeakMoment(
    rank=0,
    step=0,
    phase="backward",
    unit=-1,
    fqn=None,
    bytes=1000,
    categories=(
        CategoryBytes("optimizer_state", 200),
        CategoryBytes("activation", 300),
        CategoryBytes("unsharded_parameter", 70),
        CategoryBytes("input", 5),
    ),
    owners=(),
)


@pytest.fixture(scope="module")
def run():
    """Two ranks that gather in the dtype of the weights."""
    made = steady_run()
    units = [
        unit.model_copy(update={"unsharded_bytes": 2 * unit.sharded_bytes})
        for unit in made.manifest.units
    ]
    return replace(made, manifest=made.manifest.model_copy(update={"units": units}))


def whole(run, peak=PEAK, device_bytes=None, **changes) -> WholeMemory:
    manifest = run.manifest.model_copy(update=changes)
    found = measure_whole_memory(manifest, peak, device_bytes)
    assert found is not None
    return found


def test_a_sharded_run_needs_the_parts_of_all_ranks_on_each_rank(run):
    shards = sum(unit.sharded_bytes for unit in run.manifest.units)
    found = whole(run)
    ranks = found.num_ranks
    assert ranks == run.manifest.world_size
    assert found.parameter_bytes == found.gradient_bytes == ranks * shards
    assert found.optimizer_bytes == ranks * 200
    assert found.other_bytes == 305  # without FSDP's own gathers
    assert found.total_bytes == 2 * ranks * shards + ranks * 200 + 305


@pytest.mark.parametrize(("trained", "gradient", "optimizer"), [(0, 0, 0), (100, 400, 30)])
def test_parameters_of_no_unit_are_whole_already(run, trained, gradient, optimizer):
    units = run.manifest.units
    model = run.manifest.model.model_copy(
        update={
            "num_parameters": 100 + sum(unit.num_parameters for unit in units),
            "num_trainable_parameters": trained
            + sum(unit.num_trainable_parameters for unit in units),
        }
    )
    held = (CategoryBytes("sharded_parameter", 400), CategoryBytes("optimizer_state", 30))
    peak = replace(PEAK, owners=(OwnerBytes(NO_UNIT, None, 430, held),))
    found, ranks = whole(run, peak, model=model), run.manifest.world_size
    of_units = ranks * sum(unit.sharded_bytes for unit in units)
    assert found.parameter_bytes == of_units + 400
    assert found.gradient_bytes == of_units + gradient
    assert found.optimizer_bytes == ranks * (200 - optimizer) + optimizer


def test_it_fits_a_device_that_is_a_ninth_larger(run):
    needs = whole(run).total_bytes
    assert whole(run, device_bytes=int(needs / 0.9) + 1).verdict is FitVerdict.FITS
    between, below = whole(run, device_bytes=needs), whole(run, device_bytes=needs - 1)
    assert between.verdict is FitVerdict.UNKNOWN
    assert "cannot tell, because the allocator and the backend need up to 10%" in between.sentence
    assert below.verdict is FitVerdict.DEVICE


def test_what_is_unknown_is_said(run):
    assert "cannot tell, because the memory of the device is unknown" in whole(run).sentence
    assert "cannot tell, because no memory step" in whole(run, peak=None).sentence
    assert whole(run, peak=None).total_bytes is None


def test_a_run_of_ddp_says_what_sharding_would_free(run):
    units = [
        unit.model_copy(update={"replicate_group": unit.shard_group, "shard_group": -1})
        for unit in run.manifest.units
    ]
    found = whole(run, sharder=DDP, units=units)
    state = 2 * sum(unit.sharded_bytes for unit in units) + 200
    assert found.freed_bytes == state - -(-state // found.num_ranks)
    assert "FSDP would save at most" in found.sentence
    copied = whole(run, sharder=DDP, units=units, observed={"gradient_as_bucket_view": "False"})
    assert copied.freed_bytes == found.freed_bytes + found.gradient_bytes
    model = run.manifest.model.model_copy(
        update={"num_parameters": 1000 + sum(unit.num_parameters for unit in units)}
    )
    frozen = whole(run, sharder=DDP, units=units, model=model)
    assert frozen.state_bytes == found.state_bytes + 4000
    assert "This counts 1,000 parameters outside the buckets" in frozen.sentence


def test_an_import_and_a_run_of_one_rank_have_no_answer(run):
    imported = run.manifest.model_copy(update={"source": "imported"})
    assert measure_whole_memory(imported, PEAK, None) is None
    alone = [unit.model_copy(update={"shard_group": -1}) for unit in run.manifest.units]
    lonely = run.manifest.model_copy(update={"units": alone})
    assert measure_whole_memory(lonely, PEAK, None) is None


def test_the_saving_lies_between_no_bucket_hidden_and_all_but_the_last(run):
    memory = whole(run)
    memory = replace(memory, gradient_bytes=(1 << 20) + 3 * (25 << 20))
    found = measure_replication_saving(run, memory, {"all_gather": 10**12, "reduce_scatter": 5})
    assert found.reason == ""
    assert found.exposed_ns == 10**12 + 5
    assert found.low_ns == found.exposed_ns - found.all_reduce_ns
    hidden = found.high_ns - found.low_ns
    assert np.isclose(hidden, found.all_reduce_ns * 51 / 76, rtol=1e-3)
    assert describe_replication_saving(found).startswith("DDP would save ")


def test_waits_for_late_ranks_are_no_saving(run):
    exposed, memory = {"all_gather": 10**12}, whole(run)
    found = measure_replication_saving(run, memory, exposed, {"straggler": 10**11})
    assert found.exposed_ns == 10**12 - 10**11
    all_late = measure_replication_saving(run, memory, exposed, {"straggler": 10**12})
    assert describe_replication_saving(all_late).startswith(
        "Whether DDP would save time: cannot tell, because its all-reduce is inferred to take "
    )


def test_a_saving_that_may_be_a_loss_is_said_as_one():
    saving = ReplicationSaving(-30, 40, 60, 90, "")
    assert describe_replication_saving(saving) == (
        "DDP would save at most 40 ns a step. If backward hides no all-reduce, it is 30 ns slower."
    )


def test_a_run_that_gathers_in_another_dtype_has_no_saving(run):
    units = [
        unit.model_copy(update={"unsharded_bytes": unit.unsharded_bytes // 2})
        for unit in run.manifest.units
    ]
    other = replace(run, manifest=run.manifest.model_copy(update={"units": units}))
    found = measure_replication_saving(other, whole(run), {"all_gather": 100})
    assert (found.low_ns, found.high_ns) == (None, None)
    assert "cannot tell, because the run gathers in another dtype" in describe_replication_saving(
        found
    )
