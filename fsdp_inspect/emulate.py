"""How does a script meet 64 ranks on one device? `python -m fsdp_inspect.emulate`.

python -m fsdp_inspect.emulate --world-size 64 --bandwidth 50GB/s train.py --lr 3e-4

`fsdp_inspect.recording.emulating_launcher` says what it does, `--help` which options there are.
"""

from fsdp_inspect.recording.emulating_launcher import main

if __name__ == "__main__":
    main()
