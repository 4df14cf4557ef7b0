"""The whole story by the commands a user types: from the demo checkpoint to a repository that anyone can check.

It runs in the environment of the tests, not in a fresh one.
"""

import json
import os
import subprocess
import sys

import pytest

from hub_server import hub

TOKEN = "hf_goodgoodgood"
STORY = """
convert demo extended --method mspoe --schedule by-parts --ratio-min 2 --ratio-max 4 --head-order calibrated
verify extended --against demo
eval demo extended --task needle,short --lengths 512 --samples 2 --out before
finetune extended tuned --data demo --length 512 --steps 3 --batch-size 1
eval demo extended tuned --task needle,short --lengths 512 --samples 2 --out report
verify tuned --against demo
push tuned me/tuned --report report --private
push tuned me/tuned --report report --private
push extended me/extended
push tuned me/tuned-lora --adapter --base me/extended
verify me/tuned
"""
GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for place in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    ids = tokenizer("The grass is", return_tensors="pt")["input_ids"]
    print(model.generate(ids, max_new_tokens=8, do_sample=False).tolist())
"""


@pytest.mark.slow
def test_from_the_demo_to_the_hub(tmp_path):
    with hub({}, tmp_path / "hub") as server:
        server.tokens = {TOKEN: "me"}
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_COLOR": "1"}

        def call(*command: str) -> str:
            result = subprocess.run(
                command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=600
            )
            assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
            assert TOKEN not in result.stdout + result.stderr
            return result.stdout

        outputs = [call(sys.executable, "-m", "ctxext", *line.split()) for line in STORY.strip().splitlines()]
        repository = server.repositories["me/tuned"]
        assert "all there already" in outputs[7]
        assert server.private == {"me/tuned"}
        assert {path.name for path in server.repositories["me/tuned-lora"].iterdir()} >= {"adapter_config.json"}
        card = (repository / "README.md").read_text()
        assert "### needle" in card
        assert "report/needle.png" in card
        assert (repository / "report" / "needle.png").is_file()
        manifest = json.loads((repository / "ctxext.json").read_text())
        assert all(manifest["weights"].values())
        assert not [path for path in repository.rglob("*.json") if str(tmp_path) in path.read_text()]
        downloaded, local = call(sys.executable, "-c", GENERATE, "me/tuned", "tuned").splitlines()
        assert downloaded == local
