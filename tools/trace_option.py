"""Count the files and functions that the value of an option passes, from the command line to config.json.

    python tools/trace_option.py

It runs `ctxext convert demo --method yarn --factor 3.7 OUT` in this process. A function of ctxext holds the factor if
one of its arguments or locals, when it is entered or left, is the number 3.7, or a dataclass, dict, list or tuple in
which that number is. Each call counts once, and a jump is one in another file than the one counted before it. The path
ends where config.json is opened for writing; what follows is the card, the record and what is printed. Lambdas,
comprehensions and the code of modules are not counted.
"""

import dataclasses
import operator
import os
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ctxext
from ctxext.cli.app import app

FACTOR = 3.7
PACKAGE = str(Path(ctxext.__file__).parent) + os.sep


def holds(value: Any, depth: int = 6) -> bool:
    """Return whether a value is the factor or contains it, at most `depth` containers deep."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return depth > 0 and any(holds(entry, depth - 1) for entry in value)
    return isinstance(value, float) and value == FACTOR


def main() -> None:
    """Run the command, and print the counts."""
    called, holding, ends, frames = list[CodeType](), list[CodeType](), list[int](), set[FrameType]()

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("config.json") and "w" in str(arguments[1]):
            ends.append(len(holding))

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE) or code.co_name[0] == "<":
            return
        if event == "call":
            called.append(code)
        if frame not in frames and any(map(holds, frame.f_locals.values())):
            frames.add(frame)
            holding.append(code)
        if event == "return":
            frames.discard(frame)

    sys.addaudithook(listen)
    with tempfile.TemporaryDirectory() as folder:
        words = ["convert", "demo", "--method", "yarn", "--factor", str(FACTOR), f"{folder}/out"]
        sys.setprofile(watch)
        try:
            app(words, standalone_mode=False)
        finally:
            sys.setprofile(None)
    path = holding[: ends[0]]
    for name, calls in (("the command", called), ("factor", holding), ("factor, up to config.json", path)):
        files = [code.co_filename for code in calls]
        jumps = sum(map(operator.ne, files, files[1:]))
        print(f"{name}: {len(calls)} calls, {len(set(calls))} functions, {len(set(files))} files, {jumps} jumps")
    for file in sorted({code.co_filename for code in path}):
        names = {code.co_qualname for code in path if code.co_filename == file}
        print(f"  {file.removeprefix(PACKAGE)}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
