"""A process that has loaded everything once and runs each command line in a fork of itself, which it may kill.

One JSON object per line on stdin: `words`, and `events` or `seconds` after which the run is killed with SIGKILL, its
own processes too. Answers one on stdout: `code` (-9 where it was killed), `events` and `seconds` that it came to, and
what it `said`. Events are what the run does to the file system, to processes and to the network, counted before they
happen, so that a kill falls between any two of them whatever the machine is busy with.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

WARM = """
    torch transformers peft accelerate matplotlib.figure optuna sqlalchemy.dialects.sqlite pandas datasets psutil
    transformers.models.llama.modeling_llama transformers.trainer transformers.integrations.tensor_parallel
    ctxext.cli.app ctxext.converters ctxext.evaluate ctxext.finetune ctxext.finetune.loop ctxext.finetune.prepare
    ctxext.evaluate.model ctxext.evaluate.report.page ctxext.search ctxext.search.loop ctxext.search.picture
    ctxext.publish.push
""".split()  # noqa: SIM905
COUNTED = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}
COUNTED |= {"shutil.copyfile", "subprocess.Popen", "sqlite3.connect", "socket.connect", "os.utime", "os.chmod"}


def is_counted(event: str, given: tuple) -> bool:
    """Whether an audit event leaves something behind."""
    if event == "open":
        return isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in COUNTED


def run(words: list[str], until: int | None, log: Path, count: int) -> None:
    """In the fork: run the command line, dying at an event."""
    os.setsid()
    opened = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
    for stream in (1, 2):
        os.dup2(opened, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    seen = 0

    def hook(event: str, given: tuple) -> None:
        nonlocal seen
        if is_counted(event, given):
            seen += 1
            os.pwrite(count, f"{seen:9d}".encode(), 0)
            if seen == until:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)
    from ctxext.cli.app import main

    sys.argv = ["ctxext", *words]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(place: Path) -> None:
    """Answer until stdin ends."""
    log = place / "log"
    for line in sys.stdin:
        asked, started = json.loads(line), time.monotonic()
        count = os.open(place / "count", os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        child = os.fork()
        if not child:
            run(asked["words"], asked.get("events"), log, count)
        waiting = os.pidfd_open(child)
        left = asked.get("seconds", 300)
        if not select.select([waiting], [], [], left)[0]:
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        seconds = time.monotonic() - started
        events = int(os.pread(count, 9, 0) or b"0")
        for descriptor in (waiting, count):
            os.close(descriptor)
        said = log.read_text(errors="replace") if log.exists() else ""
        answer = {"code": os.waitstatus_to_exitcode(status), "events": events, "seconds": seconds, "said": said}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    # Whatever is printed while loading is no answer.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in WARM:
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder))
