"""Tokenizers of bytes with the chat templates of published models, and messages for them.

`data/chat_templates.zip` has the templates that TRL 1.16.0 ships, and their licence.
"""

import re
import zipfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

with zipfile.ZipFile(Path(__file__).parent / "resources" / "chat_templates.zip") as archive:
    TEMPLATES = {
        name.removesuffix(".jinja"): archive.read(name).decode()
        for name in archive.namelist()
        if name.endswith(".jinja")
    }
TOKEN = re.compile(r"<[|｜][^|｜>]+[|｜]>|<\|?[a-z_]+\|?>|</(?:think|tool_call|s)>|\[gMASK\]")
PLAIN = re.compile(r"</?think>|</?tool_call>|<｜(?:User|Assistant)｜>")
"""Tokens that are never divided but are not special."""
ENDS = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
    "phi3": "<|endoftext|>",
    "glm": "<|endoftext|>",
    "llama": "<|eot_id|>",
    "gemma": "<eos>",
}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def tokenizer_for(name, template=None):
    """A tokenizer of bytes with the tokens that a template writes."""
    template = template or TEMPLATES[name]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = next((token for prefix, token in ENDS.items() if name.startswith(prefix)), "</s>")
    tokens = sorted({*TOKEN.findall(template), end, "<bos>"})
    tokenizer.add_tokens([AddedToken(token, special=not PLAIN.fullmatch(token), normalized=False) for token in tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=end)
    fast.chat_template = template
    return fast
