"""Forks of a Python that has loaded much already, in the place of new ones: a tenth of a second instead of several.

There are two kinds. A `clean` one has torch and transformers loaded and nothing of ctxext; `conftest.py` puts it into
`ctxext.files.isolated`, and a test that asks for the fixture `real_processes` gets real ones. One of `ours` has loaded
ctxext too. Both read the settings of the Hub's client anew. `run` takes the arguments of `subprocess.run` for `python
-c CODE` and `python -m ctxext` and executes the same code; whatever else it is asked is run for real.

Run as a script this is a process that forks: it listens on a socket, reads one JSON object for each connection (`code`,
`words`, `cwd`, `env`, `input`, and `timeout` in seconds or 0) and answers with one (`returncode`, `stdout`, `stderr`).
Asked for `ours`, a socket, a fork of the clean one loads ctxext and listens there, so that torch and transformers are
loaded once for both.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

CLEAN = """
    torch transformers transformers.dynamic_module_utils transformers.generation transformers.modeling_layers
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.integrations.sdpa_attention safetensors.torch
""".split()  # noqa: SIM905
OURS = """
    ctxext.cli.app ctxext.cli.convert ctxext.cli.inspect ctxext.cli.eval ctxext.cli.search ctxext.cli.finetune
    ctxext.cli.merge ctxext.cli.verify ctxext.cli.push ctxext.converters.convert ctxext.verify.run ctxext.evaluate.run
    ctxext.cli.demo ctxext.cli.methods ctxext.cli.env pydantic yaml
    ctxext.verify ctxext.files.isolated ctxext.publish.push ctxext.evaluate
    ctxext.models.model
""".split()  # noqa: SIM905
MAIN = "from ctxext.cli.app import main\nimport sys\nsys.argv[0] = 'ctxext'\nmain()"
# What each fork reads anew, or what does not concern it. Where anything else differs, a process is started for real.
HUB = {"HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_TOKEN"}
FREE = {"HF_MODULES_CACHE", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_", "COLUMNS", "LINES", "CTXEXT_CLEAN"} | HUB
FREE |= {"CTXEXT_CANARIES", "CTXEXT_TRACEBACK"}
# What libraries set in their own process while they work; a new one would not look at it.
SET_BY_LIBRARIES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "VLLM_", "ACCELERATE_", "TOKENIZERS_")


def compared(environment: dict[str, str]) -> dict[str, str]:
    """The variables in which a process and its stand-in must agree."""
    passed_over = {name for name in environment if name in FREE or name.startswith(SET_BY_LIBRARIES)}
    return {name: value for name, value in environment.items() if name not in passed_over}


class Processes:
    """Stands in for `subprocess` where nothing of it but `run` is used.

    Args:
        kind: "clean" or "ours".
        place: A socket on which one listens already.
        clean: For "ours": the clean one that it is a fork of, once it is needed.
    """

    CompletedProcess = subprocess.CompletedProcess

    def __init__(self, kind: str, place: str | None = None, clean: "Processes | None" = None) -> None:
        self.kind, self.place, self.clean, self.process, self.has_answered = kind, place, clean, None, False
        self.environment = compared(dict(os.environ))
        if kind == "clean":
            from ctxext.files.isolated import SETTINGS

            self.environment |= {name: value for name, value in SETTINGS.items() if name not in FREE}

    def run(self, command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        """What `subprocess.run` gives."""
        environment = {str(name): str(value) for name, value in (options.get("env") or os.environ).items()}
        known = {"capture_output", "text", "cwd", "env", "check", "input", "timeout"}
        words = [str(word) for word in command]
        codes = {"-c": words[2:3], "-m": [MAIN] if self.kind == "ours" and words[2:3] == ["ctxext"] else []}
        code = codes.get(words[1], []) if words[0] == sys.executable else []
        differs = compared(environment) != self.environment
        if code and differs and self.kind == "clean":
            names = sorted(name for name, _ in compared(environment).items() ^ self.environment.items())
            raise AssertionError(f"{names} differ: each check would start a Python of its own (fixture real_processes)")
        if not code or differs or set(options) - known or not options.get("capture_output") or options.get("check"):
            return subprocess.run(command, **options)
        given = {"code": code[0], "words": words[3:], "cwd": str(options.get("cwd") or Path.cwd())}
        given["timeout"] = options.get("timeout") or 0
        answer = self.ask({**given, "env": environment, "input": options.get("input", "")})
        if given["timeout"] and answer["returncode"] == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(command, given["timeout"], answer["stdout"], answer["stderr"])
        return subprocess.CompletedProcess(command, answer["returncode"], answer["stdout"], answer["stderr"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of the process that forks."""
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(self.listening())
            there.sendall(json.dumps(request).encode())
            there.shutdown(socket.SHUT_WR)
            return json.loads(received(there))

    def start(self) -> str:
        """Begin to load, and say at which socket it will listen."""
        if self.clean:
            self.place = f"{self.clean.listening()}-ours"
            return self.place
        self.place = str(Path(tempfile.mkdtemp(prefix="ctxext-forks-")) / "socket")
        words = [sys.executable, __file__, self.place]
        environment = {**self.environment, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(words, env=environment, cwd="/", stdout=subprocess.DEVNULL)
        return self.place

    def listening(self) -> str:
        """The socket, once somebody listens on it."""
        place = self.place or self.start()
        deadline = time.monotonic() + 300
        if self.clean and not self.has_answered:
            self.clean.ask({"ours": place})
        while not self.has_answered:
            with socket.socket(socket.AF_UNIX) as there, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                there.connect(place)
                self.has_answered = True
            assert self.process is None or self.process.poll() is None, "the process that forks ended while it loaded"
            assert time.monotonic() < deadline, f"nobody listens on {place}"
            time.sleep(0 if self.has_answered else 0.05)
        return place

    def end(self) -> None:
        """Let it go."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            shutil.rmtree(Path(self.place).parent)
        self.place = self.process = None
        self.has_answered = False


def received(connection: socket.socket) -> bytes:
    """What the other end sent, once it has sent all."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def read_settings_anew(environment: dict[str, str]) -> None:
    """What transformers and the Hub's client keep of the environment since they were imported."""
    for name in ("transformers.utils.hub", "transformers.utils", "transformers.dynamic_module_utils"):
        if name in sys.modules and "HF_MODULES_CACHE" in environment:
            sys.modules[name].HF_MODULES_CACHE = environment["HF_MODULES_CACHE"]
    before = dict(vars(sys.modules["huggingface_hub.constants"]))
    constants = importlib.reload(sys.modules["huggingface_hub.constants"])
    for module in [module for name, module in sys.modules.items() if name.startswith("huggingface_hub.")]:
        for name, value in before.items():  # Before version 1 some modules have the address by value.
            if name.isupper() and vars(module).get(name) is value:
                setattr(module, name, getattr(constants, name))
    sys.modules["huggingface_hub.hf_api"].api.endpoint = constants.ENDPOINT
    if "ctxext" in sys.modules:
        isolated = sys.modules["ctxext.files.isolated"]
        isolated.subprocess = Processes("clean", environment["CTXEXT_CLEAN"])


def execute(asked: dict[str, Any]) -> int:
    """In the fork: what Python does with `-c`."""
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    read_settings_anew(asked["env"])
    sys.argv, sys.path[0] = ["-c", *asked["words"]], ""
    try:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run it in a fork."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(asked["input"].encode())
        given.seek(0)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(asked["timeout"])
            for number, file in enumerate((given, output, errors)):
                os.dup2(file.fileno(), number)
            code = 1
            try:
                code = execute(asked)
                threading._shutdown()
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (output, errors):
            file.seek(0)
        return {"returncode": code, "stdout": output.read().decode(), "stderr": errors.read().decode()}


def serve(listener: socket.socket, starter: int) -> None:
    """Answer each connection in a process of its own, so that several may be under way, while who started it lives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while is_alive(starter):
        if not select.select([listener], [], [], 2)[0]:
            continue
        here, _ = listener.accept()
        with here:
            if os.fork():
                continue
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(BrokenPipeError):
                asked = json.loads(received(here) or "null")  # Who only tries whether somebody listens sends nothing.
                if asked and "ours" in asked:
                    here.sendall(b"{}")
                    here.close()
                    load_and_serve(OURS, asked["ours"], starter)
                elif asked:
                    here.sendall(json.dumps(answer(asked)).encode())
            os._exit(0)


def is_alive(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def load_and_serve(modules: list[str], place: str, starter: int) -> None:
    """Import these modules, then serve at a socket; do nothing where somebody listens there already."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        with contextlib.redirect_stdout(sys.stderr):
            for module in modules:
                __import__(module)
        listener.listen(64)
        gc.collect()
        gc.freeze()
        serve(listener, starter)


if __name__ == "__main__":
    sys.path[0] = ""
    load_and_serve(CLEAN, sys.argv[1], os.getppid())
