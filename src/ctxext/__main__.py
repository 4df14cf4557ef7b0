"""The entry point of `python -m ctxext` and `accelerate launch -m ctxext`: the command line."""

from ctxext.cli.app import main

if __name__ == "__main__":
    main()
