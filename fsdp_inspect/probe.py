"""Measure the network between the ranks of a job: `torchrun ... -m fsdp_inspect.probe`.

torchrun --nproc-per-node 8 -m fsdp_inspect.probe runs/<run>

See `fsdp_inspect.recording.network_probe` for its behaviour, and `--help` for its options.
"""

from fsdp_inspect.recording.network_probe import main

if __name__ == "__main__":
    main()
