"""Describe a run: command, model, device, mesh, versions, environment and code."""

from dataclasses import dataclass

from fsdp_inspect.trace.run import RunManifest


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The description of a run, from its manifest."""

    name: str
    created: str
    """Time of creation, ISO 8601, UTC."""
    command: tuple[str, ...]
    model: str
    num_parameters: int
    device_type: str
    device_name: str
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
        device_type=manifest.device_type,
        device_name=manifest.device_name,
        mesh=manifest.mesh,
        versions=manifest.versions,
        environment=manifest.environment,
        git_commit=manifest.git_commit,
        tags=tuple(manifest.tags),
    )
