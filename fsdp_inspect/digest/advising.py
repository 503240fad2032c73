"""What should be changed about a run? The analyses' answers as evidence for the advice."""

from collections.abc import Callable

from fsdp_inspect.advice.advise import Advice, Wishes, give_advice
from fsdp_inspect.advice.findings import Evidence
from fsdp_inspect.analysis.allocator import measure_allocator
from fsdp_inspect.digest.run import RunDigest, digest_run
from fsdp_inspect.trace.run import RunSource


def advise_run(
    run: RunSource,
    wishes: Wishes,
    *,
    on_play: Callable[[int], object] = lambda _: None,
) -> Advice:
    """Digest a run, and advise on it.

    Args:
        run: A run; one that cannot be simulated still has its findings.
        wishes: What the advice is for.
        on_play: Called with the number of plans played so far.
    """
    return give_advice(run, _evidence(run, digest_run(run)), wishes, on_play=on_play)


def _evidence(run: RunSource, digest: RunDigest) -> Evidence:
    exposed, peak_rank = digest.exposed, digest.memory.peak_rank
    return Evidence(
        manifest=run.manifest,
        verdict=digest.verdict,
        plan_check=digest.plan_check,
        allocator=None if peak_rank is None else measure_allocator(run, rank=peak_rank),
        causes_ns=exposed.causes_ns if exposed else {},
        exposed_by_kind_ns=exposed.by_kind_ns if exposed else {},
        backward_gathers_ns=exposed.backward_gathers_ns if exposed else 0,
        device_bytes=digest.memory.device_bytes,
    )
