"""A process that has loaded everything once and runs each command line in a fork of itself, which it may kill.

One JSON object per line on stdin: `words`, and `events` or `seconds` after which the run is killed with SIGKILL, its
own processes too. Events are what the run does to the file system, to processes and to the network, counted before
they happen, so that a kill falls between any two of them whatever the machine is busy with. It may also be given a
folder to be `in`, limits by their names in `resource`, and `nobody`: without root's rights.

With `terminated` it gets SIGTERM after so many seconds and goes on.

Answers one on stdout: `code` (-9 where it was killed), `events`, `seconds` and processor's seconds (`busy`) that it
came to, by how many bytes its memory grew beyond what is loaded (`grown`), and what it `said`. With the word `light` on
its own command line the server has loaded no torch.
"""

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import sys
import time

WARM = """
    encodings.idna torch transformers peft accelerate matplotlib.figure optuna sqlalchemy.dialects.sqlite pandas
    datasets psutil transformers.models.llama.modeling_llama transformers.trainer
    transformers.integrations.tensor_parallel ctxext.cli.app ctxext.cli.convert ctxext.cli.merge ctxext.cli.eval
    ctxext.cli.finetune ctxext.cli.search ctxext.cli.push ctxext.converters.convert ctxext.evaluate.run
    ctxext.finetune.run ctxext.merge.run ctxext.search.run pydantic yaml
    ctxext.finetune.trainer ctxext.finetune.prepare ctxext.models.model ctxext.report.page ctxext.search
    ctxext.search.study ctxext.publish.push
""".split()  # noqa: SIM905
COUNTED = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"}
COUNTED |= {"shutil.copyfile", "subprocess.Popen", "sqlite3.connect", "socket.connect", "os.utime", "os.chmod"}


def is_counted(event: str, given: tuple) -> bool:
    """Whether an audit event leaves something behind."""
    if event == "open":
        return isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in COUNTED


def run(asked: dict, says: int, count: mmap.mmap) -> None:
    """In the fork: run the command line, dying at an event."""
    os.setsid()
    os.chdir(asked.get("in", "/"))
    for stream in (1, 2):
        os.dup2(says, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, limit in asked.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if asked.get("nobody"):
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.environ["HOME"] = "/nonexistent"
    until, seen = asked.get("events"), 0

    def hook(event: str, given: tuple) -> None:
        nonlocal seen
        if is_counted(event, given):
            seen += 1
            count[:8] = seen.to_bytes(8, "little")
            if seen == until:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)
    from ctxext.cli.app import main

    sys.argv = ["ctxext", *asked["words"]]
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


def answer(asked: dict) -> dict:
    """Run one command line in a fork."""
    started, count = time.monotonic(), mmap.mmap(-1, 8)
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        run(asked, says, count)
    os.close(says)
    said, until = b"", started + asked.get("seconds", 300)
    terminated = started + asked["terminated"] if "terminated" in asked else None
    # Its own processes may hold the pipe for longer, so that both are waited for.
    ended = os.pidfd_open(child)
    while True:
        ready = select.select([hears, ended], [], [], max((terminated or until) - time.monotonic(), 0))[0]
        if hears in ready and (piece := os.read(hears, 1 << 16)):
            said += piece
        elif not ready and terminated:
            os.kill(child, signal.SIGTERM)
            terminated = None
        elif ended in ready or not ready:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    for descriptor in (hears, ended):
        os.close(descriptor)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "events": int.from_bytes(count[:8], "little"),
        "seconds": time.monotonic() - started,
        "busy": used.ru_utime + used.ru_stime,
        "grown": 1024 * (used.ru_maxrss - LOADED),
        "said": said.decode(errors="replace"),
    }


if __name__ == "__main__":
    # Whatever is printed while loading is no answer.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in WARM if "light" not in sys.argv else ("ctxext.cli.app", "ctxext.cli.convert"):
        __import__(name)
    LOADED = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in sys.stdin:
        ANSWERS.write(json.dumps(answer(json.loads(line))) + "\n")
        ANSWERS.flush()
