"""Script: llama.cpp's converter for a checkpoint with an unknown tokenizer.

    python to_gguf.py LLAMA_CPP SOURCE OUT JSON

JSON holds `metadata`, which is written as `--override-kv` would have it, and `rope_freqs`, a list or null. Tokens go in
and out as ids but in `eval`, whose sentences this pre-tokenizer cuts like the demo's own.
"""

import json
import runpy
import sys


def main():
    """Convert."""
    root, source, out, more = sys.argv[1:]
    extra = json.loads(more)
    sys.path[:0] = [root, f"{root}/gguf-py"]
    import torch
    from conversion import base
    from conversion.llama import LlamaModel

    usual, tensors = LlamaModel.set_gguf_parameters, LlamaModel.generate_extra_tensors

    def set_gguf_parameters(self):
        usual(self)
        for key, value in extra["metadata"].items():
            kind, _, number = value.partition(":")
            self.gguf_writer.kv_data[0].pop(key, None)
            if kind == "float":
                self.gguf_writer.add_float32(key, float(number))
            elif kind == "str":
                self.gguf_writer.add_string(key, number)
            else:
                self.gguf_writer.add_uint32(key, int(number))

    def generate_extra_tensors(self):
        if extra["rope_freqs"] is None:
            yield from tensors(self)
        else:
            yield "rope_freqs.weight", torch.tensor(extra["rope_freqs"])

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
    LlamaModel.set_gguf_parameters = set_gguf_parameters
    LlamaModel.generate_extra_tensors = generate_extra_tensors
    sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(f"{root}/convert_hf_to_gguf.py", run_name="__main__")


main()
