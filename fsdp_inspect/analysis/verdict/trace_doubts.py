"""Find the reason why an imported trace allows no conclusion about what limits the step."""

from fsdp_inspect.analysis.breakdown import StepBreakdown
from fsdp_inspect.analysis.verdict import Verdict, give_no_verdict
from fsdp_inspect.formatting import format_ns, format_ratio
from fsdp_inspect.trace.run import RunManifest

LOST_RATIO = 0.1
"""The fraction of lost kernels from which a trace allows no conclusion."""
PAUSE_RATIO = 0.5
"""The fraction of a trace that one pause takes, from which it may lie between two steps."""


def find_doubt(manifest: RunManifest, step: StepBreakdown) -> Verdict | None:
    """Return the first reason for no conclusion, as a verdict; None: a conclusion is possible."""
    if manifest.source != "imported":
        return None
    for find in (_unread, _no_kernels, _lost_kernels, _several_devices, _pause):
        doubt = find(manifest)
        if doubt is not None:
            return doubt
    if manifest.world_size > 1 and not step.communication_ns:
        return give_no_verdict(
            f"No conclusion: this trace of {manifest.world_size:,} ranks shows no communication.",
            "The step of several ranks communicates. The trace lacks these events, or they have "
            "names that this version does not know, so what limits the step is not known.",
            "Profile a whole step on a rank that trains. If the trace contains the communication, "
            "report the names of its kernels.",
        )
    return None


def _unread(manifest: RunManifest) -> Verdict | None:
    unread, read = manifest.num_unread_events, manifest.num_device_events
    if unread <= read:
        return None
    return give_no_verdict(
        f"No conclusion: {unread:,} events of the trace were not understood.",
        f"Only {read:,} kernels and copies were read. The other events have categories that "
        "this version does not know, so the parts of the step are not known.",
        "Report the device and the categories, which the notes of the run list.",
    )


def _no_kernels(manifest: RunManifest) -> Verdict | None:
    if not manifest.lacks_kernels:
        return None
    return give_no_verdict(
        "No conclusion: the trace of a device shows no kernels.",
        f"The processes train on devices ({manifest.backend}), but the trace shows their host "
        "only. When the host issues work is not when the device runs it.",
        "Profile with the activity of the device too, such as ProfilerActivity.CUDA.",
    )


def _lost_kernels(manifest: RunManifest) -> Verdict | None:
    lost, launches = manifest.num_lost_launches, manifest.num_launches
    if lost < LOST_RATIO * launches or not lost:
        return None
    return give_no_verdict(
        f"No conclusion: the trace lacks {format_ratio(lost / launches)} of the launched kernels.",
        f"{lost:,} of {launches:,} kernel launches have no kernel in the trace. The profiler drops "
        "kernels if its buffers are full, and the device then looks idle.",
        "Profile fewer steps, or with record_shapes=False and with_stack=False.",
    )


def _several_devices(manifest: RunManifest) -> Verdict | None:
    devices = manifest.num_devices_per_trace
    if devices < 2:
        return None
    return give_no_verdict(
        f"No conclusion: one trace joins the kernels of {devices} devices.",
        "Work of one device then hides waits of another one, so what limits each device is not "
        "known.",
        "Import one trace for each device: profile each rank in its own process and file.",
    )


def _pause(manifest: RunManifest) -> Verdict | None:
    pause, trace = manifest.longest_pause_ns, manifest.paused_trace_ns
    if pause <= PAUSE_RATIO * trace:
        return None
    return give_no_verdict(
        f"No conclusion: one pause takes {format_ratio(pause / trace)} of the trace.",
        f"The device does nothing for {format_ns(pause)} of {format_ns(trace)} in one piece. The "
        "trace was imported as one step, so whether the pause lies in a step is not known.",
        "Profile with schedule=... and prof.step(), and import with --by-step.",
    )
