"""One file per sharder: FSDP2, FSDP1 and DDP, behind the interface of `base`."""
