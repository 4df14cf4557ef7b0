"""Prompts for engines, and the log-probabilities in transformers.

All of it is made of the checkpoint in the package, whose heads have 32 dimensions: on a CPU vLLM takes no smaller ones.
"""

import torch
from transformers import AutoModelForCausalLM

from ctxext.methods import DynamicNtk, Llama3, LongRope, MsPoE, Ntk, NtkByParts, PositionInterpolation, Yarn

RISING = tuple(1.0 + 3.0 * number / 15 for number in range(16))
RECIPES = {
    "pi": [PositionInterpolation(factor=4)],
    "ntk": [Ntk(factor=4)],
    "yarn": [Yarn(factor=4)],
    "ntk-by-parts": [NtkByParts(factor=4)],
    "llama3": [Llama3(factor=4)],
    "longrope": [LongRope(factor=4, long_factor=RISING, short_factor=RISING)],
    "longrope with two lists": [LongRope(factor=4, long_factor=RISING, short_factor=(1.0,) * 16)],
    "dynamic": [DynamicNtk(factor=4)],
    "mspoe fixed": [MsPoE(first_layer=0, head_order="fixed")],
    "mspoe by parts on yarn": [
        Yarn(factor=4),
        MsPoE(schedule="by-parts", ratio_min=1, ratio_max=2, first_layer=0, head_order="fixed"),
    ],
}
LENGTHS = (40, 400, 1900)


def prompts(lengths=LENGTHS):
    """Return random token ids of the demo's vocabulary, one prompt per length."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 3000, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def expected(folder, asked):
    """Compute the log-probability of every token except the first, in transformers and float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    probabilities = []
    for ids in asked:
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        probabilities.append(scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return probabilities


def largest(served, wanted):
    """Return the largest difference of each prompt."""
    return [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in zip(served, wanted, strict=True)]
