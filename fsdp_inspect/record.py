"""Record an unmodified training script: `torchrun ... -m fsdp_inspect.record`.

torchrun --nproc-per-node 8 -m fsdp_inspect.record --out runs train.py --lr 3e-4

See `fsdp_inspect.recording.launcher` for its behaviour, and `--help` for its options.
"""

from fsdp_inspect.recording.launcher import main

if __name__ == "__main__":
    main()
