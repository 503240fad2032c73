"""Describe the sharding of a run in a few words, for lists of runs and the tops of reports."""

from collections import Counter

from fsdp_inspect.trace.run import RunManifest


def describe_sharding(manifest: RunManifest) -> str:
    """Describe the sharding in short: `10 units, reshard after forward, bfloat16`."""
    units = manifest.units
    facts = [f"{len(units)} {'unit' if len(units) == 1 else 'units'}", _describe_reshard(manifest)]
    mesh = " x ".join(f"{size} {name}" for name, size in manifest.mesh.items() if size > 1)
    facts.append(f"mesh {mesh}" if len(manifest.mesh) > 1 and mesh else "")
    facts.append(" and ".join(sorted({unit.param_dtype for unit in units})))
    return ", ".join(fact for fact in facts if fact)


def _describe_reshard(manifest: RunManifest) -> str:
    settings = [repr(unit.reshard_after_forward) for unit in manifest.units if not unit.is_root]
    counts = Counter(settings)
    if len(counts) > 1:
        return f"{counts['True']} of {len(settings)} reshard after forward"
    words = {"True": "reshard after forward", "False": "kept after forward", "None": ""}
    return "".join(words.get(one, f"reshard to groups of {one} ranks") for one in counts)
