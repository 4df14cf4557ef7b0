"""Train the demo checkpoint from scratch: tokenizer, model and figures, with one command, on CPU or GPU.

    python tools/train_demo.py --work work-folder --threads 1 --bfloat16

Run it again with the same work folder and it goes on from its last state. Every batch is made from the seed and the
number of its step, so a resumed run sees the batches that an uninterrupted one would have seen.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.data import prose
from ctxext.demo.corpus import TASKS, make_example, make_prompt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--work", type=Path, required=True, help="folder for the state of the run")
parser.add_argument("--out", type=Path, default=Path("src/ctxext/demo/checkpoint"), help="folder for the checkpoint")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves the default")
parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16; the weights stay float32")
parser.add_argument("--scale", type=float, default=1.0, help="how many of the steps below to run; for trials")
parser.add_argument("--peak-rate", type=float, default=3e-3)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--head-dim", type=int, default=32)
parser.add_argument("--stop-after", type=int, default=0, help="stop after this many steps, as if interrupted")
options = parser.parse_args()
if options.threads:
    torch.set_num_threads(options.threads)

WINDOW = 512
VOCABULARY = 3072
BEGIN, END = "<|begin|>", "<|end|>"
# Steps, tokens per batch, lengths with their shares, share of evaluation prompts. Recall is learned on short documents
# first, with few different numbers, many steps and small batches. At the full length from the start, or with small
# initial embeddings and a high learning rate for them, the loss on answers does not fall. Short lengths remain in the
# mixture to the end.
STAGES = (
    (1500, 2048, {32: 0.4, 64: 0.6}, 0.0),
    (800, 2048, {32: 0.2, 64: 0.6, 96: 0.2}, 0.0),
    (600, 4096, {64: 0.3, 128: 0.7}, 0.3),
    (600, 6144, {64: 0.1, 128: 0.3, 256: 0.6}, 0.4),
    (3500, 4096, {64: 0.04, 96: 0.06, 128: 0.1, 192: 0.1, 256: 0.15, 384: 0.13, 512: 0.42}, 0.5),
)
EMBEDDING_DEVIATION, EMBEDDING_RATE = 0.15, 0.3  # how embeddings begin, and their learning rate beside the others'
# Numbers in use: all of them until each has been seen, then few, then twice as many every so many steps.
FEW_FROM, FEWEST, WIDEN_FROM, WIDEN_STEPS = 500, 0.03, 900, 120
FIRST_SHARE, FIRST_FROM = 1 / 3, 0.75  # share of prompts about the first fact, from this part of the run on
STAGE_ENDS = [round(options.scale * sum(stage[0] for stage in STAGES[: i + 1])) for i in range(len(STAGES))]
NUM_STEPS = STAGE_ENDS[-1]
LANGUAGE_WEIGHT, LANGUAGE_SHARE = 0.5, 0.25  # prose is scored at a quarter of its tokens, which is cheaper
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE: words of the grammar are one token each, numbers are cut into groups of three digits."""
    tokenizer = Tokenizer(models.BPE())
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(options.seed)
    numbers = " ".join([f"{n:03d}" for n in range(1000)] * 20 + [f"{n:02d}" for n in range(100)] * 20)
    text = [" ".join(islice(prose.sentences(rng), 20)) for _ in range(400)] + [numbers]
    for task, share in TASKS.values():
        for _ in range(round(400 * share)):
            pieces = task.pieces(rng)
            filler = "".join(next(pieces.haystack) for _ in range(10))
            text.append(pieces.opening + "".join(pieces.needles) + filler + "".join(pieces.questions[0][:2]))
    tokenizer.train_from_iterator(text, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def config_dict() -> dict[str, object]:
    """Return config.json, in the formats of transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": WINDOW,
        "initializer_range": 0.06,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and answer marks of one step, each (batch, length)."""
    _, tokens, lengths, prompt_share = STAGES[next(i for i, end in enumerate(STAGE_ENDS) if step < end)]
    rng = random.Random(f"{options.seed} {step}")
    length = rng.choices(list(lengths), list(lengths.values()))[0]
    variety = 1.0 if step < options.scale * FEW_FROM else FEWEST
    variety = min(1.0, variety * 2 ** (max(0, step - options.scale * WIDEN_FROM) / WIDEN_STEPS))
    first = FIRST_SHARE if step >= FIRST_FROM * NUM_STEPS else 0.0
    examples = []
    for _ in range(tokens // length):
        start = [0] if rng.random() < 0.85 else []
        examples.append(make_example(encode, start, rng, length, prompt_share, variety, first))
    ids = torch.tensor([example.ids for example in examples])
    return ids.to(options.device), torch.tensor([example.is_answer for example in examples]).to(options.device)


def rate(step: int) -> float:
    """Return the learning rate of a step.

    It warms up, follows a cosine to 0.3 of the peak while recall forms, stays level, and falls linearly at the end.
    """
    level_from, down_from = STAGE_ENDS[2], 0.9 * NUM_STEPS
    if step < level_from:
        return options.peak_rate * min((step + 1) / 100, 0.3 + 0.35 * (1 + math.cos(math.pi * step / level_from)))
    return options.peak_rate * 0.3 * min(1.0, max(0.03, (NUM_STEPS - step) / (NUM_STEPS - down_from)))


def exact_match(model: LlamaForCausalLM, name: str, length: int, samples: int, seed: str) -> list[float]:
    """Return the share of prompts answered exactly, by depth.

    An answer is exact if each of its tokens is the arg-max given the tokens before it.
    """
    shares = []
    for depth in DEPTHS:
        hits = 0
        for first in range(0, samples, max(1, 8192 // length)):
            prompts = []
            for i in range(first, min(first + max(1, 8192 // length), samples)):
                rng = random.Random(f"{seed} {name} {length} {depth} {i}")
                prompt = make_prompt(encode, [0], rng, length, TASKS[name][0], depth)
                if prompt is None:
                    raise SystemExit(f"{name} does not fit into {length} tokens")
                prompts.append(prompt)
            ids = torch.tensor([prompt.ids for prompt in prompts]).to(options.device)
            asked = torch.tensor([prompt.is_answer for prompt in prompts]).to(options.device)
            keep = int(asked.sum(1).max())
            with torch.no_grad():
                best = model(ids, logits_to_keep=keep + 1).logits[:, :-1].argmax(-1)
            hits += int(((best == ids[:, -keep:]) | ~asked[:, -keep:]).all(1).sum())
        shares.append(round(hits / samples, 4))
    return shares


def write_json(path: Path, content: object) -> None:
    """Write indented JSON with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


options.work.mkdir(parents=True, exist_ok=True)
log_path = options.work / "training_log.jsonl"


def log(record: dict[str, object]) -> None:
    """Print a record and append it to the log."""
    print(time.strftime("%H:%M:%S"), json.dumps(record), flush=True)
    with log_path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# 1. The tokenizer.
tokenizer_path = options.work / "tokenizer.json"
if not tokenizer_path.exists():
    train_tokenizer().save(str(tokenizer_path))
tokenizer = Tokenizer.from_file(str(tokenizer_path))


def encode(text: str) -> list[int]:
    """Return the token ids of a text, without the begin token."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


# 2. The model, its optimizer, and the state of an earlier run if there is one.
torch.manual_seed(options.seed)
config = LlamaConfig(**{key: value for key, value in config_dict().items() if not key.endswith("dtype")})
model = LlamaForCausalLM(config).to(options.device, torch.float32)
embedding = model.get_input_embeddings().weight
torch.nn.init.normal_(embedding, std=EMBEDDING_DEVIATION)
matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
vectors = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [
        {"params": matrices, "weight_decay": 0.05, "relative_rate": 1.0},
        {"params": vectors, "weight_decay": 0.0, "relative_rate": 1.0},
        {"params": [embedding], "weight_decay": 0.0, "relative_rate": EMBEDDING_RATE},
    ],
    betas=(0.9, 0.95),
    lr=options.peak_rate,
)
state_path = options.work / "state.pt"
step, seconds = 0, 0.0
if state_path.exists():
    state = torch.load(state_path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step, seconds = state["step"], state["seconds"]
num_parameters = sum(p.numel() for p in model.parameters())
print(f"{num_parameters:,} parameters, step {step} of {NUM_STEPS}, {options.device}", flush=True)

# 3. The loop.
started = time.perf_counter() - seconds
last_print = step
while step < NUM_STEPS:
    ids, is_answer = make_batch(step)
    sampled = torch.rand(is_answer.shape, generator=torch.Generator().manual_seed(step)).to(options.device)
    answers = is_answer[:, 1:]
    language = ~answers & (sampled[:, 1:] < LANGUAGE_SHARE)
    with torch.autocast(options.device, torch.bfloat16, enabled=options.bfloat16):
        hidden = model.model(ids).last_hidden_state[:, :-1]
        chosen = answers | language
        logits = model.lm_head(hidden[chosen])
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    of_answer = answers[chosen]
    # Recall forms from documents with dozens of answers, while evaluation prompts have one. From the fourth stage on, a
    # document's weight is the square root of its number of answers.
    number = answers.sum(1, keepdim=True).clamp(min=1).float()
    weight = number.pow(-0.5 if step >= STAGE_ENDS[2] else 0.0).expand_as(answers)[chosen][of_answer]
    answer_loss = (losses[of_answer] * weight).sum() / weight.sum().clamp(min=1e-6)
    language_loss = losses[~of_answer].mean()
    (answer_loss + LANGUAGE_WEIGHT * language_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate(step) * group["relative_rate"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % 25 == 0:
        right = (logits.argmax(-1) == ids[:, 1:][chosen])[of_answer].float().mean()
        record = {"step": step, "length": ids.shape[1], "answer_loss": round(answer_loss.item(), 4)}
        record |= {"answer_tokens_right": round(right.item(), 4), "language_loss": round(language_loss.item(), 4)}
        log(record | {"seconds": round(time.perf_counter() - started)})
    if step % 250 == 0 or step == NUM_STEPS or step == options.stop_after:
        seconds = time.perf_counter() - started
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        torch.save(state, state_path.with_suffix(".new"))
        state_path.with_suffix(".new").replace(state_path)
        if step == options.stop_after:
            raise SystemExit
    if step >= STAGE_ENDS[2] and step % 500 == 0:
        length = 256 if step < STAGE_ENDS[3] else WINDOW
        for name in TASKS:
            figures = exact_match(model, name, length, 20, f"training {step}")
            log({"step": step, "task": name, "length": length, "exact_match_by_depth": figures, "samples": 20})

# 4. The checkpoint: bfloat16 weights, and all other files written as data, so that transformers 4 and 5 both read it.
options.out.mkdir(parents=True, exist_ok=True)
weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
del weights["lm_head.weight"]  # tied to the embedding
save_file(weights, options.out / "model.safetensors", metadata={"format": "pt"})
(options.out / "model.safetensors").chmod(0o644)
write_json(options.out / "config.json", config_dict())
write_json(options.out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
tokenizer.save(str(options.out / "tokenizer.json"))
special = {"bos_token": BEGIN, "eos_token": END}
write_json(options.out / "special_tokens_map.json", special)
write_json(
    options.out / "tokenizer_config.json",
    special
    | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": WINDOW,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
            | {"special": True}
            for i, text in enumerate((BEGIN, END))
        },
    },
)

# 5. The figures, measured on the saved checkpoint loaded back; beyond the window with the usual schedules too.
LONG_TASKS = ("passkey", "needle", "kv-number", "documents-fact")
dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
factor = 4.0
schedules: dict[str, dict[str, object]] = {
    "unmodified": {"rope_type": "default", "rope_theta": 10000.0},
    "pi": {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor},
    "ntk": {"rope_type": "default", "rope_theta": 10000.0 * factor ** (options.head_dim / (options.head_dim - 2))},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": WINDOW},
}


def load(schedule: str, dtype: str) -> LlamaForCausalLM:
    """Load the saved checkpoint with another frequency schedule."""
    config = LlamaConfig.from_pretrained(options.out, rope_parameters=schedules[schedule])
    return LlamaForCausalLM.from_pretrained(options.out, config=config, dtype=dtypes[dtype]).to(options.device).eval()


def measure(schedule: str, dtype: str, length: int, names: Iterable[str], samples: int) -> None:
    """Measure a schedule and log one line per task."""
    loaded = load(schedule, dtype)
    for name in names:
        by_depth = exact_match(loaded, name, length, samples, "final")
        record = {"final": True, "schedule": schedule, "computed_in": dtype, "task": name, "length": length}
        log(record | {"depths": DEPTHS, "exact_match_by_depth": by_depth, "samples_per_depth": samples})


for length in (256, WINDOW):
    measure("unmodified", "float32", length, TASKS, 100)
measure("unmodified", "bfloat16", WINDOW, TASKS, 100)
for length in (1024, 2048):
    measure("unmodified", "float32", length, LONG_TASKS, 10)
for schedule in ("yarn", "ntk", "pi"):
    for length in (2048, WINDOW):
        measure(schedule, "float32", length, LONG_TASKS, 10)
log(
    {
        "parameters": num_parameters,
        "seed": options.seed,
        "steps": NUM_STEPS,
        "training_seconds": round(seconds),
        "device": options.device,
        "computed_in": "bfloat16" if options.bfloat16 else "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
)
shutil.copyfile(log_path, options.out / "training_log.jsonl")
