"""Find replicas, buffers and learning rates that should be equal on all ranks, and differ.

- Seen: sampled values before the first updates and later; up to 8 buffers before sampled updates
  and at the end; the learning rates of the first and the last updates.
- Proof: replicas differ before the first update, or differ for good although their gradients
  agree; a buffer keeps a value of its own on each rank of a model that is sharded or replicated;
  ranks that train the same parameters use different learning rates in each of the last updates.
- Noted: tensor-parallel ranks hold other values of a parameter that they do not split as others.
- Refuted by: buffers that the training changes, such as the statistics of BatchNorm, which may
  differ; ranks that train a model each; an optimizer whose parameters differ between ranks (ZeRO).
"""

from collections.abc import Iterator, Sequence

from fsdp_inspect.analysis.correctness.faults import Observed, TrainingCheck, TrainingFault
from fsdp_inspect.analysis.correctness.samples import (
    LEAST_UPDATES,
    NO_SAMPLES,
    Holders,
    differ,
    list_holders,
)
from fsdp_inspect.formatting import format_ranks, listed, plural
from fsdp_inspect.trace.correctness import TrainingSeen

_EXACT = 1e-9
"""Norms of equal gradients, which an all-reduce gives to all ranks, differ by less."""
_OWN = ("expert", "rank", "local", "shard")
"""In the name of a buffer: each rank may have one of its own."""


def check_replicas(observed: Observed) -> Iterator[TrainingFault]:
    """Find values that should be equal on all ranks, and differ."""
    if not any(each.updates for each in observed.seen.values()):
        observed.not_checked[TrainingCheck.REPLICAS] = NO_SAMPLES
        return
    replicas = [each for each in list_holders(observed) if each.parameter.is_replica]
    yield from _differ_first(replicas)
    yield from _differ_beside_split(observed)
    rates = _rates_differ(observed)
    if rates is not None:
        yield rates
    else:
        yield from _drift(replicas)
    yield from _buffers_differ(observed)


def _differ_first(replicas: Sequence[Holders]) -> Iterator[TrainingFault]:
    known = [each for each in replicas if each.num_updates and not each.starts_equal]
    wrong = [each for each in known if differ(each.values(0))]
    if not wrong:
        return
    ranks = sorted(wrong[0].updates)
    norms = ", ".join(f"{norm:.3g}" for norm in wrong[0].values(0)[:4] if norm is not None)
    yield TrainingFault(
        TrainingCheck.REPLICAS,
        tuple(ranks),
        "Replicas of the model start from different values.",
        f"Before the first sampled update, {wrong[0].parameter.name} differs between "
        f"{format_ranks(ranks)}, which keep replicas of it: the sampled norms are {norms}. Equal "
        "gradients keep the difference forever.",
        "Start all replicas from equal values: set one seed before the model is made, load one "
        "checkpoint, or broadcast the parameters from one rank.",
        is_certain=True,
    )


def _differ_beside_split(observed: Observed) -> Iterator[TrainingFault]:
    """Note whole parameters of tensor-parallel ranks that differ."""
    for ranks in observed.list_tensor_parallel():
        seen = [observed.seen[rank] for rank in ranks if observed.seen[rank].updates]
        names = [[each.name for each in one.parameters] for one in seen]
        if len(seen) < len(ranks) or any(each != names[0] for each in names):
            continue
        parts = [{tuple(one.parameters[at].part) for one in seen} for at in range(len(names[0]))]
        values = [{one.updates[0].digests[at] for one in seen} for at in range(len(names[0]))]
        wrong = [
            name
            for name, part, value in zip(names[0], parts, values, strict=True)
            if len(part) == 1 and len(value) > 1
        ]
        if wrong and any(len(part) > 1 for part in parts):
            verb, them = ("differs", "it") if len(wrong) == 1 else ("differ", "them")
            yield TrainingFault(
                TrainingCheck.REPLICAS,
                tuple(ranks),
                f"Tensor-parallel {format_ranks(ranks)} hold different values.",
                f"Before the first sampled update, {listed(wrong, 1)} {verb} between these "
                f"ranks. No DTensor splits {them}, as it splits other parameters.",
                "Make the model with one seed on all ranks, or broadcast these parameters from one "
                "of them. If each rank holds a part of its own, ignore this.",
                is_note=True,
            )
            return


def _drift(replicas: Sequence[Holders]) -> Iterator[TrainingFault]:
    """Find replicas that start equal, receive equal gradients, and differ later."""
    for each in replicas:
        updates = range(each.num_updates)
        first = next((n for n in updates if not each.is_equal(n)), None)
        if first is None or first == 0 or each.num_updates - first < LEAST_UPDATES:
            continue
        agree = not any(differ(each.gradients(n), _EXACT) for n in updates)
        if not agree or any(each.is_equal(n) for n in updates if n >= first):
            continue
        ranks = sorted(each.updates)
        steps = next(iter(each.updates.values()))
        yield TrainingFault(
            TrainingCheck.REPLICAS,
            tuple(ranks),
            "Replicas of the model drift apart.",
            f"{each.parameter.name} was equal on {format_ranks(ranks)} before the update of step "
            f"{steps[first - 1].step}, and differs before each of "
            f"{plural(each.num_updates - first, 'sampled update')} after it. Its gradients are "
            "equal: the ranks apply different updates.",
            "Look for what differs between the ranks after the reduction: settings of the "
            "optimizer, noise on weights, values that one rank writes. Broadcast the parameters "
            "from one rank once.",
        )
        return


def _rates_differ(observed: Observed) -> TrainingFault | None:
    for ranks in observed.list_peers():
        known = {rank: observed.seen[rank] for rank in ranks if observed.seen[rank].updates}
        sizes = {
            tuple(one.num_tensors for one in each.optimizers) for each in known.values()
        }  # of ZeRO, each rank has tensors of its own
        by_step = [_rates_of(each) for each in known.values()]
        steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
        if len(known) < 2 or len(sizes) > 1:
            continue
        wrong = [differ([each[step] for each in by_step], _EXACT) for step in steps]
        if len(wrong) < LEAST_UPDATES or not all(wrong[-LEAST_UPDATES:]):
            continue
        shown = ", ".join(f"{each[steps[-1]]:.3g}" for each in by_step[:4])
        return TrainingFault(
            TrainingCheck.REPLICAS,
            tuple(known),
            "The learning rate differs between the ranks.",
            f"In {sum(wrong)} of {plural(len(wrong), 'step')}, {format_ranks(sorted(known))} "
            f"used different learning rates, such as {shown} in step {steps[-1]}, although they "
            "train the same model.",
            "Give all ranks one learning rate: call the scheduler on each rank, and reduce a "
            "loss that it depends on over the ranks first.",
            observed.place_of_update(min(known)),
        )
    return None


def _rates_of(seen: TrainingSeen) -> dict[int, float]:
    """The learning rates of the first, the sampled and the last updates, by step."""
    sampled = {each.step: each.rate for each in seen.updates}
    return sampled if seen.late is None else sampled | seen.late.rates


def _buffers_differ(observed: Observed) -> Iterator[TrainingFault]:
    """Find buffers that keep a value of their own on each rank."""
    for ranks in observed.list_peers():
        seen = {rank: observed.seen[rank] for rank in ranks}
        parts = {tuple(tuple(one.part) for one in each.parameters) for each in seen.values()}
        is_replica = any(one.is_replica for each in seen.values() for one in each.parameters)
        if len(parts) < 2 and not is_replica:  # each rank may train a model of its own
            continue
        wrong = []
        for together in zip(*(each.buffers for each in seen.values()), strict=False):
            name = together[0].name
            is_own = any(word in name.lower() for word in _OWN)
            is_one = all(each.name == name and each.is_constant for each in together)
            if is_one and not is_own and len({each.digest for each in together}) > 1:
                wrong.append(name)
        if not wrong:
            continue
        more = f" and {plural(len(wrong) - 1, 'other buffer')}" if len(wrong) > 1 else ""
        yield TrainingFault(
            TrainingCheck.REPLICAS,
            tuple(ranks),
            f"{plural(len(wrong), 'buffer')} of the model {'has' if len(wrong) == 1 else 'have'} "
            "different values on the ranks.",
            f"{wrong[0]}{more} differ between {format_ranks(ranks)}, and each rank keeps "
            "its values, as far as they were looked at. The ranks then train different functions "
            "with one set of parameters.",
            "Make the buffers from one seed on all ranks, or broadcast them from one rank. If each "
            "rank needs one of its own, ignore this.",
        )
        return
