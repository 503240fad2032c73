"""Programs that measure: benchmarks, validation, faults, chaos, fuzz, planted cases, frameworks."""
