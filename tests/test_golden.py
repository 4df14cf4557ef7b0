"""Every added or renamed option is noticed: tests/resources/golden.json lists them (tools/golden.py records it)."""

import json
from pathlib import Path

import typer

from ctxext.cli.app import app

FROZEN = Path(__file__).parent / "resources" / "golden.json"


def options_by_command():
    """List every option of every command, as help shows its names."""
    return {
        name: sorted(
            flag
            for one in command.params
            if one.param_type_name == "option"
            for flag in (*one.opts, *one.secondary_opts)
        )
        for name, command in typer.main.get_command(app).commands.items()
    }


def test_every_option_is_on_the_frozen_list():
    """Where this fails, record the list (`tools/golden.py --only options,help`) and give the reason in the commit."""
    assert options_by_command() == json.loads(FROZEN.read_text(encoding="utf-8"))["options"]
