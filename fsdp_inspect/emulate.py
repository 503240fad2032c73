"""Emulate many ranks on one device: `python -m fsdp_inspect.emulate`.

python -m fsdp_inspect.emulate --world-size 64 --bandwidth 50GB/s train.py --lr 3e-4

See `fsdp_inspect.emulation.launcher` for its behaviour, and `--help` for its options.
"""

from fsdp_inspect.emulation.launcher import main

if __name__ == "__main__":
    main()
