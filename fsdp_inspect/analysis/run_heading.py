"""Measure the heading of a run: its identity, its status and the breakdown of its typical step."""

from collections import Counter
from dataclasses import dataclass

from fsdp_inspect.analysis.breakdown import StepBreakdown, measure_breakdown
from fsdp_inspect.analysis.context import try_measure
from fsdp_inspect.analysis.mesh_dimensions import STAGES
from fsdp_inspect.analysis.provenance import Provenance, measure_provenance
from fsdp_inspect.analysis.step_times import measure_step_times
from fsdp_inspect.formatting import plural
from fsdp_inspect.trace.mesh_dimensions import find_dimensions, usual_dimension
from fsdp_inspect.trace.run import RunManifest, RunSource

# --- Describe a run: command, model, device, mesh, versions, environment and code.


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The description of a run, from its manifest."""

    name: str
    created: str
    """Time of creation, ISO 8601, UTC."""
    command: tuple[str, ...]
    model: str
    num_parameters: int
    num_trainable_parameters: int
    is_stage: bool
    """Whether the model and its parameters are those of one rank of a pipeline."""
    device_type: str
    device_name: str
    sharder: str
    """The title of the sharder: `FSDP2`, `DDP`; empty for an import, which does not record it."""
    mesh: dict[str, int]
    versions: dict[str, str]
    environment: dict[str, str]
    git_commit: str | None
    tags: tuple[str, ...]


def identify(manifest: RunManifest) -> RunIdentity:
    """Return the description of a run."""
    return RunIdentity(
        name=manifest.name,
        created=manifest.created,
        command=tuple(manifest.command),
        model=manifest.model.class_name,
        num_parameters=manifest.model.num_parameters,
        num_trainable_parameters=manifest.model.num_trainable_parameters,
        is_stage=_is_stage(manifest),
        device_type=manifest.device_type,
        device_name=manifest.device_name,
        sharder="" if manifest.source == "imported" else manifest.sharder_traits.title,
        mesh=manifest.mesh,
        versions=manifest.versions,
        environment=manifest.environment,
        git_commit=manifest.git_commit,
        tags=tuple(manifest.tags),
    )


def count_parameters(manifest: RunManifest) -> int | None:
    """The parameters of the model; None: unknown, as in a pipeline, where each rank has some."""
    return (not _is_stage(manifest) and manifest.model.num_parameters) or None


def _is_stage(manifest: RunManifest) -> bool:
    sizes = [(usual_dimension(name), size) for name, size in manifest.mesh.items()]
    labels = find_dimensions(manifest.process_groups, manifest.world_size)
    sizes += [(labels[group.index].label, len(group.ranks)) for group in manifest.process_groups]
    return any(name == STAGES and size > 1 for name, size in sizes)


# --- Describe the sharding of a run in a few words, for lists of runs and the tops of reports.


def describe_sharding(manifest: RunManifest) -> str:
    """Describe the sharding in short: `10 units, reshard after forward, bfloat16`."""
    units = manifest.units
    what = "bucket" if manifest.sharder_traits.has_buckets else "unit"
    is_known = bool(units) or manifest.source != "imported"
    facts = [plural(len(units), what) if is_known else "", _describe_reshard(manifest)]
    mesh = " x ".join(f"{size} {name}" for name, size in manifest.mesh.items() if size > 1)
    facts.append(f"mesh {mesh}" if len(manifest.mesh) > 1 and mesh else "")
    facts.append(" and ".join(sorted({unit.param_dtype for unit in units})))
    return ", ".join(fact for fact in facts if fact)


def _describe_reshard(manifest: RunManifest) -> str:
    if manifest.sharder_traits.has_buckets:
        return ""  # no parameter is gathered in forward
    settings = [repr(unit.reshard_after_forward) for unit in manifest.units if not unit.is_root]
    counts = Counter(settings)
    if len(counts) > 1:
        return f"{counts['True']} of {len(settings)} reshard after forward"
    words = {"True": "reshard after forward", "False": "kept after forward", "None": ""}
    return "".join(words.get(one, f"reshard to groups of {one} ranks") for one in counts)


@dataclass(frozen=True, slots=True)
class RunHeading:
    """The heading of a run and its typical step, the first fields of its `Summary`."""

    run_id: str
    status: str
    """`complete`, `running`, `cut off`, `failed`, `partial` or `imported`."""
    notes: tuple[str, ...]
    """Missing or unusual data of the run, one sentence each."""
    identity: RunIdentity
    world_size: int
    backend: str
    median_rank: int | None
    """The rank that supplies the times; None without a timed step."""
    breakdown: StepBreakdown | None
    """The typical step of the median rank; None without a timed step."""
    provenance: Provenance | None


def measure_run_heading(run: RunSource) -> RunHeading:
    """Measure the heading of a run from its summary, without waits.

    If a file is damaged, the numbers that need it are None, and `notes` gives the reason.
    """
    damage: list[str] = []
    breakdown = measure_breakdown(run).headline
    provenance = try_measure(measure_provenance, run, damage)
    manifest = run.manifest
    return RunHeading(
        run_id=manifest.run_id,
        status=run.status.value,
        notes=tuple(dict.fromkeys([*run.notes, *damage])),
        identity=identify(manifest),
        world_size=manifest.world_size,
        backend=manifest.backend,
        median_rank=measure_step_times(run).median_rank,
        breakdown=breakdown,
        provenance=provenance,
    )
