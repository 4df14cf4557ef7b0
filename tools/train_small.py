"""Train a small model of another kind than the demo: BLOOM-, GPT-2-, BERT- or DeBERTa-like. Minutes on one CPU core.

    python tools/train_small.py gpt2 --work work-folder --out gpt2-small

All learn on 128 tokens with the demo checkpoint's tokenizer. The decoders learn what it learned.
Encoders learn to fill in masked tokens of the package's prose: looking facts up both ways was not learned within an
hour. Every batch is made from the seed and the number of its step; run it again with the same work folder and it goes
on from its last state.
"""

import argparse
import json
import math
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

import ctxext.demo
from ctxext.data import prose
from ctxext.demo.corpus import Example, make_example

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("kind", choices=("bloom", "gpt2", "bert", "deberta"))
parser.add_argument("--work", type=Path, required=True, help="folder for the state of the run")
parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--scale", type=float, default=1.0, help="how many of the steps below to run; for trials")
parser.add_argument("--peak-rate", type=float, default=3e-3)
parser.add_argument("--window", type=int, default=128)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=3)
options = parser.parse_args()
torch.set_num_threads(options.threads)

WINDOW, WIDTH, LAYERS = options.window, options.width, options.layers
HEADS, INNER = WIDTH // 16, 4 * WIDTH
# Steps, tokens per batch, lengths with their shares, share of evaluation prompts. Recall is learned on short documents
# first, with few different numbers, many steps and small batches (see train_demo.py).
STAGES = (
    (900, 1024, {WINDOW // 4: 0.5, WINDOW // 2: 0.5}, 0.0),
    (600, 1024, {WINDOW // 4: 0.2, WINDOW // 2: 0.8}, 0.0),
    (900, 1024, {WINDOW // 2: 0.3, WINDOW: 0.7}, 0.3),
)
EMBEDDING_DEVIATION, EMBEDDING_RATE = 0.15, 0.3  # how embeddings begin, and their learning rate beside the others'
FEWEST, WIDEN_FROM, WIDEN_STEPS = 0.03, 300, 80  # share of numbers in use, and how often it doubles from which step
LANGUAGE_WEIGHT, LANGUAGE_SHARE = 0.5, 0.25  # decoders: prose is scored at a quarter of its tokens, which is cheaper
MASKED_SHARE = 0.3  # encoders: of all tokens
IS_ENCODER = options.kind in ("bert", "deberta")
ENDS = [round(options.scale * sum(stage[0] for stage in STAGES[: i + 1])) for i in range(len(STAGES))]
BEGIN, END, PAD, MASK = "<|begin|>", "<|end|>", "<|pad|>", "<|mask|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer.

    For encoders it also has padding and mask tokens, and adds an end token after every text.
    """
    inner = Tokenizer.from_file(str(Path(ctxext.demo.__file__).parent / "checkpoint" / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END}
    if IS_ENCODER:
        inner.add_special_tokens([PAD, MASK])
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}",
            pair=f"{BEGIN} $A {END} $B {END}",
            special_tokens=[(BEGIN, inner.token_to_id(BEGIN)), (END, inner.token_to_id(END))],
        )
        names = {"cls_token": BEGIN, "sep_token": END, "pad_token": PAD, "mask_token": MASK}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=WINDOW, **names)


def make_model(vocabulary: int) -> Any:
    """Return a small model of the chosen kind, with random weights."""
    shared: dict[str, Any] = {"vocab_size": vocabulary, "initializer_range": 0.06, "bos_token_id": 0, "eos_token_id": 1}
    if options.kind == "bloom":
        return transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, seq_length=WINDOW, **shared)
        )
    if options.kind == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=INNER, n_positions=WINDOW, **no_dropout, **shared
            )
        )
    shared |= {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": WINDOW,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if options.kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**shared))
    # As DeBERTa v3, which has half as many buckets of distances on each side as positions.
    distances = {"relative_attention": True, "position_buckets": WINDOW // 2, "norm_rel_ebd": "layer_norm"}
    attention = {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_biased_input": False}
    return transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(type_vocab_size=0, **distances, **attention, **shared)
    )


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token ids, answer marks and positions of one step, each (batch, length)."""
    _, tokens, lengths, prompt_share = STAGES[next(i for i, end in enumerate(ENDS) if step < end)]
    rng = random.Random(f"{options.seed} {step}")
    length = rng.choices(list(lengths), list(lengths.values()))[0]
    variety = min(1.0, FEWEST * 2 ** (max(0, step - options.scale * WIDEN_FROM) / WIDEN_STEPS))
    examples, offsets = [], []
    # An encoder learns only from its masked tokens, so its batches are twice as large.
    for _ in range((2 if IS_ENCODER else 1) * tokens // length):
        if IS_ENCODER:
            text = encode(" ".join(islice(prose.sentences(rng), length // 8)))[: length - 2]
            examples.append(Example([0, *text, *[2] * (length - 2 - len(text))], [False] * (length - 1)))
        else:
            start = [0] if rng.random() < 0.85 else []
            examples.append(make_example(encode, start, rng, length, prompt_share, variety))
        # Only visited rows of a table are trained: half of the short documents begin anywhere in the window.
        offsets.append(rng.randint(0, WINDOW - length) if rng.random() < 0.5 else 0)
    closing = [1] * IS_ENCODER
    ids = torch.tensor([example.ids + closing for example in examples])
    is_answer = torch.tensor([example.is_answer + [False] * IS_ENCODER for example in examples])
    return ids, is_answer, torch.tensor(offsets)[:, None] + torch.arange(length)


def losses_of(step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the loss on answers, the loss on other tokens, and the share of correct predictions.

    The share counts answer tokens, or all predicted tokens if there are no answers.
    """
    ids, is_answer, positions = make_batch(step)
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step))
    given = {} if options.kind == "bloom" else {"position_ids": positions}
    if IS_ENCODER:
        chosen = (drawn < MASKED_SHARE) & (ids > 1)
        # Of the chosen, 80 % are masked, 10 % replaced, 10 % unchanged (Devlin et al. 2018, section 3.1).
        fate = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step + 10**6))
        other = torch.randint(2, tokenizer.mask_token_id - 1, ids.shape, generator=torch.Generator().manual_seed(step))
        seen = torch.where(chosen & (fate < 0.8), tokenizer.mask_token_id, ids)
        seen = torch.where(chosen & (fate >= 0.9), other, seen)
        hidden, targets, answers = model.base_model(seen, **given).last_hidden_state, ids, is_answer
        logits = model.cls(hidden[chosen])
    else:
        targets, answers = ids[:, 1:], is_answer[:, 1:]
        chosen = answers | (drawn[:, 1:] < LANGUAGE_SHARE)
        hidden = model.base_model(ids, **given).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[chosen])
    losses = torch.nn.functional.cross_entropy(logits, targets[chosen], reduction="none")
    of_answer = answers[chosen]
    # An evaluation prompt has one answer, other documents have dozens: a document's weight is the square root of its
    # number of answers.
    weight = answers.sum(1, keepdim=True).clamp(min=1).float().rsqrt().expand_as(answers)[chosen][of_answer]
    is_right = logits.argmax(-1) == targets[chosen]
    right = float((is_right[of_answer] if of_answer.any() else is_right).float().mean())
    return (losses[of_answer] * weight).sum() / weight.sum().clamp(min=1e-6), losses[~of_answer].mean(), right


def rate(step: int) -> float:
    """Return the learning rate of a step.

    It warms up, follows a cosine to 0.3 of the peak while recall forms, stays level, and falls linearly from 70 % of
    the steps on.
    """
    level_from, down_from = ENDS[1], 0.7 * ENDS[-1]
    if step < level_from:
        return options.peak_rate * min((step + 1) / 100, 0.3 + 0.35 * (1 + math.cos(math.pi * step / level_from)))
    return options.peak_rate * 0.3 * min(1.0, max(0.03, (ENDS[-1] - step) / (ENDS[-1] - down_from)))


options.work.mkdir(parents=True, exist_ok=True)
tokenizer = make_tokenizer()


def encode(text: str) -> list[int]:
    """Return the token ids of a text, without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


torch.manual_seed(options.seed)
model = make_model(len(tokenizer))
tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
torch.nn.init.normal_(tables[0], std=EMBEDDING_DEVIATION)
for table in tables[1:]:
    if len(table) == WINDOW:
        # The position table starts as sinusoids: attention to the previous token is then learned for all rows at once.
        turns = torch.arange(WINDOW)[:, None] / 1000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        table.data = EMBEDDING_DEVIATION * 2**0.5 * torch.cat([turns.sin(), turns.cos()], dim=1)
embedded = {id(weight) for weight in tables}
matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in embedded]


def pieces_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of query, key and value of a fused matrix, or another matrix whole.

    If Muon orthogonalizes the fused matrix as a whole, queries hardly learn.
    """
    if weight.shape == (WIDTH, 3 * WIDTH):  # GPT-2: side by side, stored transposed.
        return [piece.clone() for piece in weight.split(WIDTH, 1)]
    if weight.shape == (3 * WIDTH, WIDTH):  # BLOOM: head by head.
        return [piece.reshape(WIDTH, WIDTH) for piece in weight.view(HEADS, 3, -1, WIDTH).unbind(1)]
    return [weight]


def whole_of(weight: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return the matrix that the pieces form, in the shape of `weight`."""
    if weight.shape == (WIDTH, 3 * WIDTH):
        return torch.cat(pieces, 1)
    if weight.shape == (3 * WIDTH, WIDTH):
        return torch.stack([piece.view(HEADS, -1, WIDTH) for piece in pieces], 1).reshape(weight.shape)
    return pieces[0]


apart = [[torch.nn.Parameter(piece) for piece in pieces_of(matrix.data)] for matrix in matrices]


def step_apart() -> None:
    """Run a step of Muon on the pieces and copy them into the model's matrices."""
    for matrix, pieces in zip(matrices, apart, strict=True):
        for piece, own, gradient in zip(pieces, pieces_of(matrix.data), pieces_of(matrix.grad), strict=True):
            piece.data, piece.grad = own, gradient
    optimizers[0].step()
    for matrix, pieces in zip(matrices, apart, strict=True):
        matrix.data.copy_(whole_of(matrix, [piece.data for piece in pieces]))


vectors = [p for p in model.parameters() if p.dim() < 2]
# Muon at AdamW's learning rate (its update is scaled to the same size): recall forms in a quarter of the steps.
optimizers = (
    torch.optim.Muon(
        [piece for pieces in apart for piece in pieces],
        lr=options.peak_rate,
        weight_decay=0.05,
        adjust_lr_fn="match_rms_adamw",
    ),
    torch.optim.AdamW(
        [{"params": vectors}, {"params": tables, "relative_rate": EMBEDDING_RATE}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        lr=options.peak_rate,
    ),
)
state_path = options.work / "state.pt"
step, seconds = 0, 0.0
if state_path.exists():
    state = torch.load(state_path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    step, seconds = state["step"], state["seconds"]
num_parameters = sum(p.numel() for p in model.parameters())
print(f"{options.kind}: {num_parameters:,} parameters, step {step} of {ENDS[-1]}", flush=True)
model.train()
started = time.perf_counter() - seconds
while step < ENDS[-1]:
    answer_loss, language_loss, right = losses_of(step)
    (answer_loss + LANGUAGE_WEIGHT * language_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group.get("relative_rate", 1.0)
    step_apart()
    optimizers[1].step()
    model.zero_grad(set_to_none=True)
    step += 1
    if step % 25 == 0:
        record = {"step": step, "answer_loss": round(answer_loss.item(), 4), "answer_tokens_right": round(right, 4)}
        record |= {"language_loss": round(language_loss.item(), 4), "seconds": round(time.perf_counter() - started)}
        print(json.dumps(record), flush=True)
    if step % 250 == 0 or step == ENDS[-1]:
        content = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save(content | {"step": step, "seconds": time.perf_counter() - started}, state_path.with_suffix(".new"))
        state_path.with_suffix(".new").replace(state_path)

model.to(torch.bfloat16).save_pretrained(options.out)
tokenizer.save_pretrained(options.out)
figures = {"kind": options.kind, "parameters": num_parameters, "seed": options.seed, "steps": ENDS[-1]}
figures |= {"seconds": round(time.perf_counter() - started), "torch": torch.__version__}
print(json.dumps(figures | {"transformers": transformers.__version__}), flush=True)
