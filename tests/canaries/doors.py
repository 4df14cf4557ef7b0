"""The doors through which transformers runs or fetches something for a folder, each with a canary behind it."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

FAKES = Path(__file__).with_name("fakes")
"""Put on the path of other processes: a package `kernels` that notes what it is asked for, a watch on the network."""

FETCHING = Path(__file__).with_name("fetching")
"""A package that fetches while it is imported."""

CONVERTER = """
import sys
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
for kind in (AutoTokenizer, AutoConfig, AutoProcessor):
    try:
        kind.from_pretrained(sys.argv[1], trust_remote_code=True)
    except Exception as error:
        print(error, file=sys.stderr)
sys.exit("converted nothing")
"""
"""In the place of llama.cpp's converter, which trusts the code of a folder."""

CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Config(LlamaConfig):
    pass

class Model(LlamaForCausalLM):
    pass

class Words(PreTrainedTokenizerFast):
    pass

def generate(model, *args, **kwargs):
    return type(model).generate(model, *args, **kwargs)
"""


def canary(door: str) -> str:
    """Python that notes that it ran, and works."""
    return f'import os\nopen(os.environ["CTXEXT_CANARIES"], "a").write("{door}\\n")\n{CLASSES}'


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def custom_generate(folder: Path) -> None:
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(canary("custom_generate"))
    (folder / "custom_generate" / "requirements.txt").write_text("")


def adapter(folder: Path) -> None:
    """An adapter beside the weights, which transformers loads unasked: it names another base, and has no weights."""
    named = {"parent_library": "theirs", "base_model_class": "Model"}
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "them/base"}
    edit(folder / "adapter_config.json", **settings, auto_mapping=named, revision="main")
    (folder / "theirs.py").write_text(canary("adapter"))


def attention(folder: Path) -> None:
    edit(folder / "config.json", _attn_implementation="them/attention")


def attention_in_words(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="them/attention")


def kernels(folder: Path) -> None:
    edit(folder / "config.json", use_kernels=True, use_kernel=True, kernel_config={"RMSNorm": "them/kernel:RMSNorm"})


def places(folder: Path) -> None:
    """Names of other repositories in every file that has one."""
    edit(folder / "config.json", _name_or_path="them/base", custom_pipelines={"x": {"impl": "theirs.Pipeline"}})
    edit(folder / "generation_config.json", custom_generate="them/generate", trust_remote_code=True)
    edit(folder / "tokenizer_config.json", name_or_path="them/words", vocab_file="/etc/hostname", init_inputs=[])
    (folder / "theirs.py").write_text(canary("places"))


def templates(folder: Path) -> None:
    """Templates that reach for the system; transformers runs templates in a sandbox."""
    reach = "cycler.__init__.__globals__.os.system('echo template >> $CTXEXT_CANARIES')"
    (folder / "chat_template.jinja").write_text("{{ " + reach + " }}")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "more.jinja").write_text("{{ " + reach + " }}")


def processors(folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        edit(folder / name, auto_map={"AutoProcessor": "theirs.Words", "AutoImageProcessor": "theirs.Words"})
    (folder / "theirs.py").write_text(canary("processors"))


def tokenizer(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["theirs.Words", "theirs.Words"]})
    (folder / "theirs.py").write_text(canary("tokenizer"))


def tokenizer_on_the_hub(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["them/words--theirs.Words"] * 2})


def tokenizer_beside(folder: Path) -> None:
    """Code that a tokenizer names by the path of its own folder, which needs no Hub."""
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [f"{folder}--theirs.Words"] * 2})
    edit(folder / "special_tokens_map.json", auto_map={"AutoTokenizer": [f"{folder}--theirs.Words"] * 2})
    (folder / "theirs.py").write_text(canary("tokenizer_beside"))


def classes_beside(folder: Path) -> None:
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model", "AutoTokenizer": "Words"}
    edit(folder / "config.json", auto_map={auto: f"{folder}--theirs.{name}" for auto, name in classes.items()})
    (folder / "theirs.py").write_text(canary("classes_beside"))


def classes(folder: Path) -> None:
    edit(
        folder / "config.json",
        auto_map={"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model", "AutoModelForCausalLM": "theirs.Model"},
    )
    (folder / "theirs.py").write_text(canary("classes"))


def classes_on_the_hub(folder: Path) -> None:
    edit(
        folder / "config.json",
        auto_map={"AutoConfig": "them/model--theirs.Config", "AutoModelForCausalLM": "them/model--theirs.Model"},
    )


def _multimodal(folder: Path, **vision) -> None:
    """Make the model the text part of a multimodal one, whose vision part is this configuration."""
    text = json.loads((folder / "config.json").read_text())
    text.pop("architectures", None)
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "torch_dtype": "float32"}
    inner = {**text, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": inner, "vision_config": vision}))


_SMALL = {"hidden_size": 32, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1}
_DETR = {"model_type": "detr", "use_timm_backbone": False, "num_attention_heads": 2, **_SMALL}
_DPT = {**_DETR, "model_type": "dpt", "is_hybrid": False}


_HUB = {"backbone": "them/backbone", "use_pretrained_backbone": True}
_VISION: dict[str, dict[str, object]] = {
    "backbone_on_the_hub": {**_DPT, **_HUB},
    "backbone_of_detr": {**_DETR, **_HUB},
    "backbone_s_config_on_the_hub": {**_DETR, **_HUB, "use_pretrained_backbone": False},
    "backbone_of_timm": {"model_type": "detr", **_HUB, "backbone": "hf-hub:them/backbone"},
    "backbone_by_default": {"model_type": "conditional_detr"},
}
"""Vision parts whose backbone is another repository's."""

_BESIDE: dict[str, dict[str, object]] = {
    "backbone_with_code": {"use_pretrained_backbone": True},
    "backbone_s_config_with_code": {"use_pretrained_backbone": False},
    "backbone_that_trusts_itself": {"use_pretrained_backbone": True, "backbone_kwargs": {"trust_remote_code": True}},
}
"""Those whose backbone lies in a folder beside."""


def _backbone_beside(folder: Path, name: str, **more) -> None:
    """A backbone in a folder beside, whose own configuration names code; transformers asks whether to run it."""
    place = folder.parent / f"{folder.name}-backbone"
    place.mkdir(exist_ok=True)
    edit(
        place / "config.json",
        model_type="theirs",
        auto_map={"AutoConfig": "theirs.Config", "AutoBackbone": "theirs.Model"},
    )
    (place / "theirs.py").write_text(canary(name))
    _multimodal(folder, **_DETR, backbone=str(place), **more)


def backbone(name: str) -> Callable[[Path], None]:
    """Give the door of this name."""

    def door(folder: Path) -> None:
        if name in _VISION:
            _multimodal(folder, **_VISION[name])
        else:
            _backbone_beside(folder, name, **_BESIDE[name])

    door.__name__ = name
    return door


def inner_classes(folder: Path) -> None:
    """Code that a configuration inside names, for a class that transformers has and for one that it lacks."""
    classes = {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}
    _multimodal(folder, model_type="clip_vision_model", hidden_size=32, intermediate_size=32, auto_map=classes)
    (folder / "theirs.py").write_text(canary("inner_classes"))


def inner_classes_on_the_hub(folder: Path) -> None:
    classes = {"AutoConfig": "them/model--theirs.Config", "AutoModel": "them/model--theirs.Model"}
    _multimodal(folder, model_type="theirs", hidden_size=32, auto_map=classes)


class _Runs:
    def __reduce__(self):
        return exec, ("import os; open(os.environ['CTXEXT_CANARIES'], 'a').write('pickle\\n')",)


def pickles(folder: Path) -> None:
    """Pickles beside the safetensors, under every name that something loads."""
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "spk_dict.pt", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(_Runs()))


def pickle_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs()))


Door = Callable[[Path], None]

INNER: tuple[Door, ...] = (
    *map(backbone, (*_VISION, *_BESIDE)),
    inner_classes,
    inner_classes_on_the_hub,
)
"""Doors in a configuration inside config.json."""

TOGETHER: tuple[Door, ...] = (
    custom_generate,
    adapter,
    attention,
    kernels,
    places,
    processors,
    pickles,
)
"""Doors that stand open beside one another in a folder that otherwise converts and loads."""

WITH_CODE: tuple[Door, ...] = (tokenizer, classes)
"""Those by which a folder says that it has code of its own, which keeps some commands from loading it at all."""

DOORS: tuple[Door, ...] = (
    *TOGETHER,
    *WITH_CODE,
    attention_in_words,
    templates,
    tokenizer_on_the_hub,
    tokenizer_beside,
    classes_on_the_hub,
    classes_beside,
    pickle_alone,
    *INNER,
)
