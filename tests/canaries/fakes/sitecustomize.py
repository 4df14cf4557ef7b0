"""Notes every look-up of a name of the network, in each process that starts with this folder on its path."""

import os
import sys


def note(event, args):
    if event == "socket.getaddrinfo" and "CTXEXT_CANARIES" in os.environ:
        with open(os.environ["CTXEXT_CANARIES"], "a") as file:  # noqa: PTH123  Nothing is imported here.
            file.write(f"network: {args[0]}\n")


sys.addaudithook(note)
