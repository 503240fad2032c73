"""Charts of results that only pages show; `fsdp_inspect.report.charts` draws them."""
