"""Run by torchrun: loads checkpoints with their heads spread over the processes and saves the logits of the first."""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

length, out, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo")
try:
    saved = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32, tp_plan="auto"
        ).eval()
        shards = model.model.layers[0].self_attn.k_proj.weight.to_local()
        assert shards.shape[0] < model.model.layers[0].self_attn.k_proj.weight.shape[0], "nothing is spread"
        with torch.no_grad():
            logits = model(torch.arange(3, 3 + length)[None] % model.config.vocab_size).logits
        saved.append(logits.full_tensor() if hasattr(logits, "full_tensor") else logits)
    if dist.get_rank() == 0:
        torch.save(saved, out)
finally:
    dist.destroy_process_group()
