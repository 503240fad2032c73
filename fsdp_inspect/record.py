"""How is a script recorded without a line of change? `torchrun ... -m fsdp_inspect.record`.

torchrun --nproc-per-node 8 -m fsdp_inspect.record --out runs train.py --lr 3e-4

`fsdp_inspect.recording.launcher` says what it does; `--help` says which options there are.
"""

from fsdp_inspect.recording.launcher import main

if __name__ == "__main__":
    main()
