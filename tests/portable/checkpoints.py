"""Make, change and load the tiny checkpoints that these tests run on."""

import json
import shutil
import uuid
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ctxext.recipes.mspoe_layout import CODE_FILE, STUB_FILE, edit_config, family_classes, render_stub

CODE = Path(str(resources.files("ctxext.portable"))) / CODE_FILE


def convert(source, target, **options):
    """What `ctxext convert --method mspoe` writes, for a folder that has been saved already."""
    target = Path(target)
    target = target.with_name(f"{target.name}_{uuid.uuid4().hex[:8]}")  # Remote code is cached by folder name.
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    classes = family_classes(config)
    (target / "config.json").write_text(json.dumps(edit_config(config, classes=classes, **options), indent=1))
    (target / STUB_FILE).write_text(render_stub(classes))
    shutil.copyfile(CODE, target / CODE_FILE)
    return target


def load(folder, **options):
    """Load a checkpoint in float32, its own code included."""
    options = {"dtype": torch.float32, "trust_remote_code": True} | options
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
