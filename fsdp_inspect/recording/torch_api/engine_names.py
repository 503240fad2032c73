"""Recognise DeepSpeed's engines. It imports neither DeepSpeed nor torch."""

ENGINES = ("DeepSpeedEngine", "DeepSpeedHybridEngine", "PipelineEngine")
"""Names of the classes of engines."""


def is_engine(module: object) -> bool:
    """Whether an object is an engine of DeepSpeed."""
    return any(
        each.__name__ in ENGINES and each.__module__.startswith("deepspeed.")
        for each in type(module).__mro__
    )
