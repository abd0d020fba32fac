"""`python -m isoloss` and `torchrun -m isoloss` are the `isoloss` command."""

from isoloss.cli import main

if __name__ == "__main__":
    main()
