"""What a push sends, asks and says, piece by piece: links, names, answers of the Hub, and what is tried again."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from huggingface_hub import errors

from ctxext.cli.app import app
from ctxext.cli.options import build_options
from ctxext.errors import CtxextError
from ctxext.files import retrying
from ctxext.finetune.options import TrainingOptions
from ctxext.publish import push as push_module
from ctxext.publish.push import Push, hub_errors_in_one_line, prepare
from ctxext.publish.upload_plan import PushOptions, UploadPlan, adapter_in, seal, total, training_command
from records_by_hand import answers, report_of
from small_llama import ADAPTER_CARD, change_json, read_json, write_adapter


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file of this user outside of what is shared, whose content would pass for any of the shared ones."""
    return write_adapter(tmp_path / "private") / "README.md"


@pytest.mark.parametrize("name", ["README.md", "adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("inside", [False, True])
def test_links_in_an_adapter_s_folder_are_not_shared(name, inside, secret, tmp_path):
    folder = write_adapter(tmp_path / "lora" / "adapter") if inside else write_adapter(tmp_path / "lora")
    assert prepare(tmp_path / "lora", "me/lora", PushOptions(adapter=True)).sizes
    (folder / name).unlink()
    (folder / name).symlink_to(secret.with_name(name))
    with pytest.raises(
        CtxextError, match=rf'"(adapter/)?{re.escape(name)}" of .* is a link to a file outside the folder'
    ):
        prepare(tmp_path / "lora", "me/lora", PushOptions(adapter=True))
    (folder / name).unlink()
    (secret.with_name(name)).rename(folder / "own")
    (folder / name).symlink_to("own")
    assert prepare(tmp_path / "lora", "me/lora", PushOptions(adapter=True)).sizes, "a link within it is its own file"


def test_nor_is_an_adapter_that_is_a_link_itself(secret, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter").symlink_to(secret.parent)
    with pytest.raises(CtxextError, match="is a link to a file outside the folder"):
        prepare(tmp_path / "out", "me/lora", PushOptions(adapter=True))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "sub/notes.txt"])
def test_links_in_a_checkpoint_are_not_shared_with_or_without_the_checks(name, check, secret, extended):
    (extended / name).parent.mkdir(exist_ok=True)
    (extended / name).unlink(missing_ok=True)
    (extended / name).symlink_to(secret)
    with pytest.raises(CtxextError, match="is a link to a file outside the folder"):
        prepare(extended, "me/tiny", PushOptions(check=check))


def with_report(folder: Path, place: Path) -> Path:
    """An evaluation of a checkpoint, as far as a card needs it."""
    from ctxext.checkpoint.opening import open_checkpoint
    from ctxext.models.checkpoint_info import info_of
    from ctxext.tasks.settings import Settings

    info = info_of("mine", open_checkpoint(str(folder)))
    settings = Settings(tasks=("needle",), lengths=(64,), depths=(0.5,), samples=2)
    place.mkdir(exist_ok=True)
    report = report_of([info.facts()], [answers("mine", 64, 0.5, [1, 0])], settings)
    (place / "report.json").write_text(json.dumps(report))
    for name in ("report.html", "needle-mine.png", "kv-mine.png", "no (picture).png", "x.png.txt"):
        (place / name).write_bytes(name.encode())
    return place


def test_a_report_is_shared_with_the_pictures_that_the_card_shows(extended, tmp_path):
    plan = prepare(extended, "me/tiny", PushOptions(report=with_report(extended, tmp_path / "r")))
    assert {name for name in plan.texts if name != "README.md"} == {
        *("report/report.json", "report/report.html", "report/needle-mine.png")
    }
    assert "needle-mine.png" in plan.card
    seal(plan)
    record = read_json(extended / "ctxext.json")
    assert record["files"].keys() >= {"report/report.html", "config.json"}
    assert "report/report.html" not in record["weights"]
    again = prepare(extended, "me/tiny", PushOptions(report=tmp_path / "r"))
    assert again.texts == plan.texts, "the report that was shared is no part of what was measured"
    seal(again)
    assert read_json(extended / "ctxext.json") == record


def test_a_report_that_was_shared_may_be_replaced_and_nothing_else(extended, tmp_path):
    place = with_report(extended, tmp_path / "r")
    seal(prepare(extended, "me/tiny", PushOptions(report=place)))
    (extended / "report" / "report.html").write_text("of an older evaluation")
    with pytest.raises(CtxextError, match="failed verification"):
        prepare(extended, "me/tiny", PushOptions())
    assert prepare(extended, "me/tiny", PushOptions(report=place)).texts["report/report.html"] == b"report.html"
    (extended / "config.json").write_text((extended / "config.json").read_text() + " ")
    with pytest.raises(CtxextError, match=r'changed: "config\.json"'):
        prepare(extended, "me/tiny", PushOptions(report=place))


@pytest.mark.parametrize("measured_with_it", [True, False])
def test_what_lies_in_the_folder_of_a_report_is_no_other_checkpoint(measured_with_it, extended, tmp_path):
    place = None if measured_with_it else with_report(extended, tmp_path / "r")
    (extended / "report").mkdir()
    (extended / "report" / "notes.txt").write_text("notes")
    place = place or with_report(extended, tmp_path / "r")
    assert "needle-mine.png" in prepare(extended, "me/tiny", PushOptions(report=place, check=False)).card


@pytest.mark.parametrize("is_adapter", [True, False])
def test_the_card_contains_all_facts_of_the_record(is_adapter, converted, monkeypatch):
    from ctxext.publish import upload_plan

    folder, facts = converted("yarn"), []
    source = {"name": "me/llama", "revision": "abc"}
    change_json(folder / "ctxext.json", source=source, rewritten={"wpe.weight": [4, 2]})
    (folder / "loss.png").write_bytes(b"picture")
    write_adapter(folder / "adapter")
    monkeypatch.setattr(upload_plan, "render", lambda fact: facts.append(fact) or "card")
    monkeypatch.setattr(upload_plan, "cautions_of", lambda checkpoint, recipe, model: ("Mind the gap.",))
    monkeypatch.setattr(upload_plan, "training_of", lambda subject: {"steps": 3})
    plan = prepare(folder, "me/x", PushOptions(check=False, adapter=is_adapter, base="me/b" if is_adapter else None))
    assert plan.card == "card"
    (fact,) = facts
    expected = {
        **{"source": "me/llama", "revision": "abc", "rewritten": ["wpe.weight"], "cautions": ("Mind the gap.",)},
        **{"training": {"steps": 3}, "curve": "" if is_adapter else "loss.png"},
        **{"model_id": "me/x", "is_adapter": is_adapter, "measured": None},
    }
    assert {name: getattr(fact, name) for name in expected} == expected
    assert (fact.recipe.summary(), fact.model.config) == ("yarn ×4", read_json(folder / "config.json"))


@pytest.mark.parametrize("name", ["report.json", "report.html", "needle-mine.png"])
def test_links_in_a_report_s_folder_are_not_shared(name, secret, extended, tmp_path):
    place = with_report(extended, tmp_path / "r")
    (place / name).rename(secret.with_name(name))
    (place / name).symlink_to(secret.with_name(name))
    with pytest.raises(CtxextError, match=f'"{name}" of .* is a link to a file outside the folder'):
        prepare(extended, "me/tiny", PushOptions(report=place))


@pytest.mark.parametrize(
    ("named", "base", "base_name", "revision"),
    [("me/base", None, "me/base", "main"), ("me/base", "you/other", "you/other", None)],
)
def test_the_base_of_an_adapter(named, base, base_name, revision, tmp_path):
    folder = write_adapter(tmp_path / "lora", named, r=4)
    plan = prepare(folder, "me/lora", PushOptions(base=base))
    contents = {
        name: content if isinstance(content, bytes) else content.read_bytes() for name, content in plan.contents.items()
    }
    assert json.loads(contents["adapter_config.json"]) == {
        "base_model_name_or_path": base_name,
        "revision": revision,
        "r": 4,
    }
    assert plan.base == base_name
    assert contents["README.md"].decode() == ADAPTER_CARD.replace("me/base", base_name)
    assert contents["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()
    (folder / "README.md").unlink()
    assert f'base_model: "{base_name}"' in prepare(folder, "me/lora", PushOptions(base=base)).card


@pytest.mark.parametrize("named", ["/b", "b", "/home/me/b", "a/b/c", ""])
def test_bases_without_a_hub_id_are_refused(named, tmp_path):
    with pytest.raises(CtxextError, match="which is not a Hub id"):
        prepare(write_adapter(tmp_path / "lora", named), "me/lora", PushOptions())


def test_which_adapter_is_meant(tmp_path):
    assert adapter_in(tmp_path) is None
    write_adapter(tmp_path)
    assert adapter_in(tmp_path) == tmp_path
    write_adapter(tmp_path / "adapter")
    assert adapter_in(tmp_path) == tmp_path / "adapter", "that of a training"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CtxextError, match="was not created by ctxext"):
        prepare(tmp_path, "me/tiny", PushOptions())  # A checkpoint is meant where there is one.


def test_a_card_of_unknown_origin_is_written_again(extended):
    (extended / "README.md").write_text("# Who wrote this?\n")
    change_json(extended / "ctxext.json", files={})
    plan = prepare(extended, "me/tiny", PushOptions(check=False))
    assert not any("by hand" in warning for warning in plan.warnings)
    assert 'from_pretrained("me/tiny")' in plan.card


def test_weights_are_read_once(extended):
    """Weights that were compared are not read again."""
    assert prepare(extended, "me/tiny", PushOptions()).known.keys() == {"model.safetensors"}
    assert prepare(extended, "me/tiny", PushOptions(check=False)).known == {}
    content = bytearray((extended / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (extended / "model.safetensors").write_bytes(content)
    with pytest.raises(CtxextError, match="failed verification"):
        prepare(extended, "me/tiny", PushOptions())
    plan = prepare(extended, "me/tiny", PushOptions(check=False))
    steps = []
    seal(plan, lambda what, done, in_all: steps.append((done, in_all)))
    assert prepare(extended, "me/tiny", PushOptions()).known, "the record has the digest of what is there"
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][0] == steps[-1][1]
    files = read_json(extended / "ctxext.json")["files"]
    assert "ctxext.json" not in files


def test_sizes_for_people(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    plan = UploadPlan(tmp_path, ("a",), {"README.md": b"12345", "a": b"1"})
    assert plan.sizes == {"README.md": 5, "a": 1}, "what is written counts, not what was there"
    assert total({"a": 1_500_000, "b": 1_000_000_000}) == "2 files, 1,001.5 MB"


FILES = {"config.json": 3, "sub/code.py": 4, "[x]*.txt": 5}


class Hub:
    """The Hub's client, as far as a push uses it."""

    def __init__(self, **facts):
        self.calls, self.facts = [], {"private": False, "kept": [*FILES, ".gitattributes"], **facts}

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*given, **named):
            self.calls.append((name, given, named))
            return getattr(self, f"_{name}", lambda *given, **named: None)(*given, **named)

        return call

    def _model_info(self, name, revision=None):
        head = {None: "of main", "main": "of main", "v2": "of v2", "refs/pr/7": "of 7"}[revision]
        return SimpleNamespace(private=self.facts["private"], sha=head)

    def _upload_folder(self, **named):
        place = (
            {"pr_revision": "refs/pr/9", "pr_url": "pull"}
            if named["create_pr"]
            else {"pr_revision": None, "pr_url": None}
        )
        return SimpleNamespace(commit_url="commit", oid=self.facts.get("oid", "new"), **place)

    def _list_repo_files(self, name, revision=None):
        return self.facts["kept"]

    def _whoami(self):
        return {"name": "me"}

    def _get_repo_discussions(self, name, **asked):
        assert asked == {"discussion_type": "pull_request", "discussion_status": "open"}
        return [SimpleNamespace(num=number, author=who, title="Longer") for number, who in ((6, "you"), (7, "me"))]

    def named(self, name):
        return [(given, named) for called, given, named in self.calls if called == name]


@pytest.fixture
def folder(tmp_path):
    for name, size in FILES.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"x" * size)
    for name in (".hidden", ".git/config", "sub/.secret", "__pycache__/a.pyc", "sub/__pycache__/b.pyc"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"hidden")
    return tmp_path / "out"


def test_all_is_sent_but_what_is_hidden(folder):
    hub = Hub(kept=[*FILES, ".gitattributes", "theirs.txt", "other.txt"])
    done = push_module._upload(hub, folder, "me/x", PushOptions(message="Longer"))
    assert done == Push(
        "commit", "new", True, {"[x]*.txt": 5, "config.json": 3, "sub/code.py": 4}, ("other.txt", "theirs.txt")
    )
    ((_, sent),) = hub.named("upload_folder")
    assert sorted(sent.pop("allow_patterns")) == ["[[]x][*].txt", "config.json", "sub/code.py"]
    expected = {"repo_id": "me/x", "folder_path": folder, "commit_message": "Longer", "revision": None}
    assert sent == {**expected, "create_pr": False}
    assert hub.named("model_info") == [(("me/x",), {"revision": None})]


def test_files_missing_on_the_hub_are_reported(folder):
    with pytest.raises(CtxextError, match=r'"sub/code.py" is missing on the Hub'):
        push_module._upload(Hub(kept=["config.json", "[x]*.txt"]), folder, "me/x", PushOptions())


@pytest.mark.parametrize(("revision", "head"), [(None, "of main"), ("main", "of main"), ("v2", "of v2")])
def test_an_unchanged_branch_head_means_no_upload(folder, revision, head):
    options = PushOptions(revision=revision)
    assert not push_module._upload(Hub(oid=head), folder, "me/x", options).is_new
    assert push_module._upload(Hub(oid="other"), folder, "me/x", options).is_new
    hub = Hub()
    push_module._open(hub, "me/x", options)
    made = [((("me/x",)), {"branch": "v2", "exist_ok": True})] if revision == "v2" else []
    assert hub.named("create_branch") == made
    push_module._upload(hub, folder, "me/x", options)
    assert hub.named("list_repo_files") == [(("me/x",), {"revision": revision})]


def test_a_pull_request_is_opened_or_continued(folder):
    hub = Hub()
    done = push_module._upload(hub, folder, "me/x", PushOptions(create_pr=True, message="Another"))
    assert (done.url, hub.named("upload_folder")[0][1]["create_pr"]) == ("pull", True)
    assert hub.named("list_repo_files") == [(("me/x",), {"revision": "refs/pr/9"})]
    hub = Hub()
    push_module._upload(hub, folder, "me/x", PushOptions(create_pr=True, message="Longer"))
    sent = hub.named("upload_folder")[0][1]
    assert (sent["revision"], sent["create_pr"]) == ("refs/pr/7", False)
    assert hub.named("list_repo_files") == [(("me/x",), {"revision": "refs/pr/7"})]


@pytest.mark.parametrize(("private", "is_private", "is_refused"), [(1, 1, 0), (1, 0, 1), (0, 1, 0), (0, 0, 0)])
def test_what_is_to_be_private_is(private, is_private, is_refused):
    hub = Hub(private=bool(is_private))
    if is_refused:
        with pytest.raises(CtxextError, match='"me/x" exists and is public'):
            push_module._open(hub, "me/x", PushOptions(private=True))
    else:
        push_module._open(hub, "me/x", PushOptions(private=bool(private)))
    assert hub.named("create_repo") == [(("me/x",), {"private": True if private else None, "exist_ok": True})]


@pytest.mark.parametrize("plan", [{"base": "me/base", "is_adapter": True}, {}])
def test_the_base_of_an_adapter_is_required_first_and_its_folder_is_unchanged(plan, folder, monkeypatch):
    hub, sealed = Hub(kept=["README.md", *FILES]), []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token, library_name: hub)
    monkeypatch.setattr(push_module, "seal", lambda plan, progress: sealed.append(plan.folder))
    made = UploadPlan(folder, ("config.json",), {"README.md": b"card"}, **plan)
    done = push_module.send(made, "me/x", PushOptions(), token="hf_GivenGiven")
    is_adapter = bool(plan)
    first = hub.calls[0][:2]
    assert (first == ("model_info", ("me/base",))) == is_adapter
    assert sealed == ([] if is_adapter else [folder])
    assert done.sizes == ({"README.md": 4, "config.json": 3} if is_adapter else FILES)
    assert not (folder / "README.md").exists()


def answer(status, said="", message="", headers=None):
    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    Exception.__init__(error, message)
    error.response, error.server_message = SimpleNamespace(status_code=status, headers=headers or {}), said
    return error


def caused(cause, text="Error while uploading 'a.bin' to the Hub."):
    error = RuntimeError(text)
    error.__cause__ = cause
    return error


AGAIN = "Run the same command again"
ANSWERS = [
    (answer(400, "Bad\n  name"), "The Hub rejected the request: Bad name", ""),
    (answer(401, "Invalid credentials"), "The Hub rejected the token", "hf auth login"),
    (answer(401, "Your token expired"), "The Hub rejected the token", "hf auth login"),
    (answer(401, "Invalid username or password."), "The Hub rejected the token", "hf auth login"),
    (answer(401, "Repository not found"), '"me/x" does not exist on the Hub', "hf auth login"),
    (answer(402), "requires a payment", "billing"),
    (answer(403), 'No write access to "me/x"', "hf auth login"),
    (answer(404), '"me/x" does not exist on the Hub, or the token has no access to it', "hf auth login"),
    (answer(409), "being changed by another client", AGAIN),
    (answer(413, "50 GB"), "too large: 50 GB", ""),
    (answer(418, "I am a teapot"), "The Hub rejected the request (status 418): I am a teapot", ""),
    (answer(418, "", "Bearer hf_OnceShown no"), "The Hub rejected the request (status 418): Bearer … no", ""),
    (answer(429), "Too many requests", "Wait a few minutes"),
    (answer(500), "an internal error (status 500)", AGAIN),
    (answer(502), "an internal error (status 502)", AGAIN),
    (OSError("[Errno 111] Connection refused by peer."), "cannot be reached: Connection refused.", AGAIN),
    (OSError(), "cannot be reached: OSError.", AGAIN),
    (OSError("x" * 500), f"cannot be reached: {'x' * 120}", AGAIN),
    (OSError(f"{'x' * 100} https://me:password@host is away"), "x https://me:…@", AGAIN),  # Cut within the password.
    (errors.OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set", "Unset it"),
    (errors.HFValidationError("bad"), '"me/x" is not a valid Hub id', "at most 96"),
    (caused(answer(403)), 'No write access to "me/x"', "hf auth login"),
    (caused(OSError("gone")), "Error while uploading 'a.bin' to the Hub: the connection failed several times", AGAIN),
    (ValueError("Invalid README.md: hf_OnceShown"), "rejected the model card: Invalid README.md: hf_…", ""),
]


@pytest.mark.parametrize(("error", "message", "hint"), ANSWERS)
def test_each_answer_of_the_hub_in_one_line(error, message, hint):
    with pytest.raises(CtxextError) as raised, hub_errors_in_one_line("me/x"):
        raise error
    assert message in raised.value.message
    assert raised.value.message.count("\n") == 0
    assert raised.value.hint.startswith(hint) or hint in raised.value.hint
    assert bool(raised.value.hint) == bool(hint)


@pytest.mark.parametrize("error", [caused(KeyError("x")), RuntimeError("ours"), ValueError("ours")])
def test_what_is_no_answer_of_the_hub_stays_a_fault(error):
    with pytest.raises(type(error), match=str(error)), hub_errors_in_one_line("me/x"):
        raise error


@pytest.mark.parametrize(
    ("failures", "status", "attempts"), [(0, 503, 1), (1, 500, 2), (2, 503, 3), (3, 503, 3), (3, 429, 1), (3, 403, 1)]
)
def test_what_may_pass_is_tried_three_times_with_longer_pauses(failures, status, attempts, monkeypatch):
    messages, pauses, tried = [], [], []
    monkeypatch.setattr(retrying.time, "sleep", pauses.append)

    def action():
        tried.append(1)
        if len(tried) <= failures:
            with hub_errors_in_one_line("me/x"):
                raise answer(status)
        return "done"

    if failures == 3:
        with pytest.raises(CtxextError):
            push_module._call_with_retries(action, messages.append)
    else:
        assert push_module._call_with_retries(action, messages.append) == "done"
    assert len(tried) == attempts
    assert pauses == [2.0, 4.0][: attempts - 1]
    assert [line[-18:] for line in messages] == ["Retrying (1 of 2).", "Retrying (2 of 2)."][: attempts - 1]


@pytest.mark.parametrize("wrap", [lambda error: error, caused])
def test_the_hub_may_say_how_long_to_wait(wrap, monkeypatch):
    pauses, errors_left = [], [wrap(answer(503, headers={"retry-after": "7"}))]
    monkeypatch.setattr(retrying.time, "sleep", pauses.append)

    def action():
        with hub_errors_in_one_line("me/x"):
            if errors_left:
                raise errors_left.pop()

    push_module._call_with_retries(action, None)
    assert pauses == [7.0]


def test_the_command_of_a_training_names_what_was_chosen_and_nothing_of_the_machine(tmp_path):
    assert training_command(tmp_path) == ""
    options = {
        "length": 512,
        "learning_rate": 5e-5,
        "beta2": 0.95,
        "train_norms": True,
        "full": False,
        "seed": 0,
        "rank": 16,
    }
    options |= {"targets": ["q_proj"], "device": "cpu", "dtype": "bf16", "save_every": 7, "window": None, "steps": 3}
    (tmp_path / "finetune.json").write_text(json.dumps({"options": options, "data": {"name": "my books.jsonl"}}))
    assert training_command(tmp_path) == (
        "ctxext finetune EXTENDED OUT --data 'my books.jsonl' --length 512 --steps 3 --targets q_proj "
        "--train-norms --learning-rate 5e-05 --beta2 0.95"
    )
    (tmp_path / "finetune.json").write_text("{}")
    assert training_command(tmp_path) == "ctxext finetune EXTENDED OUT --data DATA"


def test_the_command_of_a_training_is_one_that_gives_the_same_options(tmp_path):
    chosen = {"short_share": 0.0, "warmup": 0.0, "positions": "pose", "targets": ("q_proj", "v_proj"), "epochs": 2.0}
    options = TrainingOptions(steps=7, rank=4, **chosen).resolve(window=4096, trained_length=1024)
    data = {"name": "a.jsonl:0.7, b.jsonl:0.3", "format": "chat", "eval": "held.jsonl"}
    (tmp_path / "finetune.json").write_text(json.dumps({"options": options.to_dict(), "data": data}))
    command = typer.main.get_command(app).commands["finetune"]
    given = command.make_context("finetune", shlex.split(training_command(tmp_path))[2:]).params
    repeated = build_options(TrainingOptions, given).resolve(window=4096, trained_length=1024)
    assert repeated == options
    assert list(given["words"]) == ["a.jsonl:0.7", "b.jsonl:0.3"]
    assert (given["record_format"], given["eval_data"]) == ("chat", "held.jsonl")
