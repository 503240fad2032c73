"""`python -m fsdp_inspect` is the `fsdp-inspect` command."""

from fsdp_inspect.cli import main

if __name__ == "__main__":
    main()
