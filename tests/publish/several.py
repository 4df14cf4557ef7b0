"""Run as a script: several `ctxext push` and `ctxext verify` lines in one process, which reads the Hub's address once.

Reads a JSON list of command lines from stdin and prints a JSON list of [exit code, stdout, stderr].
"""

import json
import sys
import time

import typer
from typer.testing import CliRunner

from ctxext.cli.push import push
from ctxext.cli.verify import verify
from ctxext.errors import CtxextError

time.sleep = lambda _seconds: None
app = typer.Typer()
app.command()(push)
app.command()(verify)
answers = []
for words in json.loads(sys.stdin.read()):
    result = CliRunner().invoke(app, words)
    error, message = result.exception, result.stderr
    if isinstance(error, CtxextError):
        message += f"error: {error.message}\nhint: {error.hint}\n"
    elif error is not None and not isinstance(error, SystemExit):
        raise error
    answers.append([result.exit_code, result.stdout, message])
sys.stdout.write(json.dumps(answers))
