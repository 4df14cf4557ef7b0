"""Lets `python -m ctxext` and `accelerate launch -m ctxext` run the command line."""

from ctxext.cli.app import main

if __name__ == "__main__":
    main()
