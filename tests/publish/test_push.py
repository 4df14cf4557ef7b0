"""`ctxext push`, by the Hub's own client, against a Hub on loopback."""

import json
import os
import sys

import pytest

from ctxext.errors import CtxextError
from ctxext.publish.push import prepare
from ctxext.publish.upload_plan import PushOptions, seal
from small_llama import change_json, read_json, write_adapter

TOKEN, STRANGER = "hf_goodgoodgood", "hf_otherother"

LOGITS = """
import json, sys, torch
from transformers import AutoModelForCausalLM

def logits(place):
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits

sys.stdout.write(json.dumps(torch.equal(logits(sys.argv[1]), logits(sys.argv[2]))))
"""


def held(server, name="me/tiny") -> dict[str, bytes]:
    """The files of a repository on the server."""
    folder = server.repositories[name]
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".gitattributes"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def local(folder) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked(server, word: str) -> list[str]:
    return [line for line in server.requests if word in line]


def test_push_then_download_gives_equal_logits(commands, server, converted, tmp_path, clean_processes):
    """Code, configuration and weights travel; the weights by the way of large files."""
    folder = converted("mspoe")
    [[code, out, err], [verified, findings, _]] = commands(
        ["push", folder, "me/tiny", "--token", TOKEN, "--json"], ["verify", "me/tiny", "--no-load", "--json"]
    )
    assert code == 0, err
    assert json.loads(out)["is_new"]
    assert held(server) == local(folder)
    assert len(asked(server, "PUT /objects/")) == 1
    assert (verified, json.loads(findings)["passed"]) == (0, True), findings
    assert TOKEN not in out + err
    environment = {**os.environ, **server.settings(tmp_path / "cache2")}
    environment |= {"USE_HUB_KERNELS": "NO", "TRANSFORMERS_VERBOSITY": "error"}
    result = clean_processes.run(
        [sys.executable, "-c", LOGITS, "me/tiny", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert result.stdout == "true", result.stderr


def test_weights_that_were_just_compared_are_not_read_again(converted, monkeypatch):
    from ctxext.publish import upload_plan

    folder, read = converted("yarn"), []
    right = upload_plan.sha256_of
    monkeypatch.setattr(upload_plan, "sha256_of", lambda path: read.append(path.name) or right(path))
    before = read_json(folder / "ctxext.json")["weights"]
    upload_plan.seal(prepare(folder, "me/tiny", PushOptions()))
    assert "model.safetensors" not in read
    assert read_json(folder / "ctxext.json")["weights"] == before


@pytest.mark.thorough
def test_a_broken_connection_then_the_same_command(commands, server, extended):
    line = ["push", extended, "me/tiny", "--token", TOKEN]
    server.cut, server.cut_times = "/commit/", 1000
    [[code, _, err]] = commands(line)
    assert code == 1
    assert "cannot be reached" in err
    assert "Run the same command again" in err
    assert err.count("error:") == 1
    assert held(server) == {}
    server.cut_times, sent = 0, len(asked(server, "PUT /objects/"))
    (server.repositories["me/tiny"] / "notes.txt").write_text("mine")
    [[code, _, err], [again, output, _]] = commands(line, line)
    assert code == 0, err
    assert "notes.txt" in err
    assert held(server) == {**local(extended), "notes.txt": b"mine"}
    assert len(asked(server, "PUT /objects/")) == sent == 1  # What had arrived was not sent twice.
    assert again == 0
    assert "already up to date" in output
    assert len(server.commits) == 1


def test_refusals_are_one_line_without_tokens(commands, server, extended):
    lines = {
        ("push", extended, "me/tiny", "--token", TOKEN): "",
        ("push", extended, "me/tiny", "--token", "hf_wrongwrong"): "rejected the token",
        ("push", extended, "me/tiny", "--token", STRANGER): 'No write access to "me/tiny"',
        ("push", extended, "someone/tiny", "--token", STRANGER): 'No write access to "someone/tiny"',
        ("push", extended, "me/ti ny", "--token", TOKEN): "not a valid Hub id",
        ("push", extended, "tiny", "--token", TOKEN): "not a valid Hub id",
        ("push", extended, "a/b/c", "--token", TOKEN): "not a valid Hub id",
        ("push", extended, "me/tiny", "--token", "hf_bro\nken"): "contains invalid characters",
        ("push", extended, "me/tiny"): "No Hub token",
        ("push", extended, "me/tiny", "--token", TOKEN, "--private"): "exists and is public",
        (
            "push",
            extended,
            "me/tiny",
            "--token",
            TOKEN,
            "--create-pr",
            "--revision",
            "v2",
        ): "combined with --revision",
    }
    before = None
    for (line, wanted), (code, out, err) in zip(lines.items(), commands(*lines), strict=True):
        before = before or held(server)
        assert code == bool(wanted), (line, err)
        assert wanted in err
        assert err.count("error:") == bool(wanted)
        assert not [word for word in (TOKEN, STRANGER, "wrongwrong", "hf_bro") if word in out + err]
    assert held(server) == before


@pytest.mark.thorough
def test_a_network_that_is_switched_off(commands, converted):
    [[code, _, err]] = commands(["push", converted("yarn"), "me/tiny", "--token", TOKEN], HF_HUB_OFFLINE="1")
    assert code == 1
    assert "Offline mode" in err
    assert err.count("error:") == 1


@pytest.mark.thorough
def test_branches_private_repositories_and_pull_requests(commands, server, extended):
    hidden = ["push", extended, "me/hidden", "--token", TOKEN, "--private"]
    branch = ["push", extended, "me/tiny", "--token", TOKEN, "--revision", "long"]
    request = ["push", extended, "me/asked", "--token", TOKEN, "--create-pr", "--message", "Longer"]
    answers = commands(hidden, branch, request, request)
    assert [code for code, _, _ in answers] == [0] * 4, answers
    assert server.private == {"me/hidden"}
    assert held(server) == {}  # The branch has it, main has not.
    assert server.folder("me/tiny", "long").joinpath("config.json").exists()
    assert server.pulls == {1: ("me/asked", "Longer")}  # Running it again opens no second one.
    assert held(server, "me/asked") == {}
    assert server.folder("me/asked", "refs/pr/1").joinpath("model.safetensors").exists()


def test_local_paths_in_a_record_are_not_published(extended):
    """Times of files and places on this disk."""
    places = {"model.safetensors": "/home/me/models/model.safetensors"}
    change_json(extended / "ctxext.json", links=places, stamps={"config.json": [1, 2]})
    seal(prepare(extended, "me/tiny", PushOptions(check=False)))
    assert not {"links", "stamps"} & read_json(extended / "ctxext.json").keys()
    assert "/home/me" not in (extended / "ctxext.json").read_text() + (extended / "README.md").read_text()


def test_options_that_contradict_each_other(extended):
    assert PushOptions() == PushOptions(private=False, create_pr=False, adapter=False, check=True)
    with pytest.raises(CtxextError, match="cannot be combined with --revision"):
        prepare(extended, "me/tiny", PushOptions(create_pr=True, revision="v2"))
    assert prepare(extended, "me/tiny", PushOptions(create_pr=True, revision="main")).names
    with pytest.raises(CtxextError, match="combined with --report"):
        prepare(extended, "me/tiny", PushOptions(adapter=True, report=extended))


def test_no_verify_shares_what_was_changed(run, extended):
    (extended / "config.json").write_text((extended / "config.json").read_text() + "\n")
    refused = run("push", extended, "me/tiny", "--dry-run")
    assert refused.exit_code == 1
    assert "failed verification" in refused.exception.message
    assert 'files: changed: "config.json"' in refused.exception.message
    assert "ctxext verify" in refused.exception.hint
    assert run("push", extended, "me/tiny", "--dry-run", "--no-verify").exit_code == 0


@pytest.mark.thorough
def test_dry_run_shows_everything_and_writes_nothing(commands, server, extended):
    before = local(extended)
    [[code, out, err]] = commands(["push", extended, "me/tiny", "--dry-run"])
    assert code == 0, err
    assert "model.safetensors" in out
    assert 'from_pretrained("me/tiny")' in out
    assert local(extended) == before
    assert server.requests == []


def test_a_card_that_a_person_wrote_stays(extended):
    (extended / "README.md").write_text("# Mine\n")
    plan = prepare(extended, "me/tiny", PushOptions())
    assert plan.card == "# Mine\n"
    assert "edited by hand" in plan.warnings[0]


def test_what_is_no_checkpoint_of_ours_is_refused(llama_source, tmp_path):
    for folder, wanted in ((llama_source, "not created by ctxext"), (tmp_path / "none", "does not exist")):
        with pytest.raises(CtxextError, match=wanted):
            prepare(folder, "me/tiny", PushOptions())


def test_the_card_of_a_trained_checkpoint_describes_the_training(extended):
    change_json(extended / "ctxext.json", finetune={"trained": "LoRA rank 4", "steps": 3})
    options = {"length": 512, "steps": 3, "rank": 4, "targets": ["q_proj", "v_proj"], "device": "cpu"}
    options["train_norms"] = True
    (extended / "finetune.json").write_text(json.dumps({"options": options, "data": {"name": "books.jsonl"}}))
    (extended / "loss.png").write_bytes(b"picture")
    card = prepare(extended, "me/tiny", PushOptions(check=False)).card
    command = "ctxext finetune EXTENDED OUT --data books.jsonl --length 512 --steps 3 --rank 4 --targets q_proj,v_proj"
    assert f"{command} --train-norms" in card.replace(" \\\n   ", "")
    assert "ctxext convert llama EXTENDED --method yarn --factor 4" in card
    assert "| trained | LoRA rank 4 |" in card
    assert "![Training loss](loss.png)" in card
    assert "byte for byte" not in card
    assert "config-only" not in card


@pytest.mark.thorough
def test_an_adapter_alone_names_its_base_and_no_folder_of_this_machine(commands, server, converted, tmp_path):
    folder = converted("yarn")
    (write_adapter(folder / "adapter", str(tmp_path / "b")) / "training_args.bin").write_bytes(b"of this machine")
    before = local(folder)
    line = ["push", folder, "me/lora", "--adapter", "--token", TOKEN]
    [[_, _, refused], [_, _, unknown]] = commands(line, [*line, "--base", "me/b"])
    server.make("me/b")
    [[code, _, err]] = commands([*line, "--base", "me/b"])
    assert 'belongs to "b", which is not a Hub id' in refused
    assert "--base USER/b" in refused
    assert "me/b" in unknown
    assert code == 0, err
    files = held(server, "me/lora")
    assert set(files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "me/b"
    assert b"PeftModel.from_pretrained" in files["README.md"]
    assert b"ctxext convert" in files["README.md"]
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert local(folder) == before
    with pytest.raises(CtxextError, match="has no adapter"):
        prepare(tmp_path, "me/lora", PushOptions(adapter=True))


def test_weights_that_are_no_adapter_s_are_refused(tmp_path):
    folder = write_adapter(tmp_path, tensor="model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CtxextError, match="does not belong to an adapter"):
        prepare(folder, "me/lora", PushOptions())
