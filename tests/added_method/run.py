"""`ctxext` with the added method; `python run.py --docs` prints its section of docs/methods.md."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tools")]

from quiet import Quiet  # noqa: E402

import ctxext.recipes.methods as methods  # noqa: E402

methods.METHODS = (*methods.METHODS, Quiet)  # The one name that a method in the package adds to this tuple.

if sys.argv[1:] == ["--docs"]:
    import make_docs

    sys.stdout.write("\n".join(make_docs._section(Quiet)))
else:
    from ctxext.cli.app import main

    main()
