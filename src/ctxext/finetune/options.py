"""How a fine-tune is run: every choice that decides its outcome, checked when it is made."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ctxext.errors import CtxextError
from ctxext.finetune.documents import LEARN
from ctxext.limits import check_numbers

_CHOICES = {
    "pack": ("off", "run-on", "restart"),
    "positions": ("full", "pose"),
    "attention": ("full", "shifted"),
    "schedule": ("cosine", "linear", "constant"),
    "dtype": ("auto", "bf16", "fp16", "fp32"),
    "report_to": ("none", "tensorboard", "wandb", "trackio"),
    "learn": LEARN,
    "quantize": ("none", "4bit"),
}
_AT_LEAST_ONE = (
    *("rank", "steps", "batch_size", "micro_batch", "save_every", "length", "start_length", "window", "group"),
    *("short_length", "original_length", "piece", "context_parallel", "eval_every", "patience"),
)
_SHARES = ("short_share", "warmup", "dropout", "weight_decay", "beta1", "beta2", "mlm_probability")
_MANY = 1000
CHANGEABLE = (
    *("device", "save_every", "report_to", "steps", "micro_batch", "checkpointing", "piece", "context_parallel"),
    *("eval_every", "keep_best", "patience"),
)
"""What may differ between a run and the one that continues it."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The choices of a fine-tune.

    Attributes:
        length: The context length to train for, in tokens; by default the base's context length.
        start_length: Tokens of the first sequences. They double up to the length, each for as many steps: a short
            beginning learns the same in less time (arXiv 2310.00576).
        learn: "answers" counts only marked answers where data marks them; "all" counts every token.
        steps: Optimizer steps.
        epochs: How often all sequences of the full length are seen; decides the steps once the data was read.
        batch_size: Sequences per step, over all processes.
        micro_batch: Sequences that one device computes at once.
        learning_rate: Its peak; by default 2e-4 with LoRA and 2e-5 without.
        schedule: How the learning rate falls: cosine, linear or constant.
        warmup: Share of the steps in which it rises.
        optimizer: An optimizer by the Trainer's own name, as adamw_torch, adamw_8bit, paged_adamw_8bit or adafactor;
            or muon, for matrices, with AdamW for the rest.
        weight_decay: How much of itself a weight loses, times the learning rate.
        beta1: How long AdamW remembers gradients, 0 to 1.
        beta2: How long it remembers their squares, 0 to 1.
        neftune: Noise on the embeddings (arXiv 2310.05914); none by default.
        rank: Rank of the LoRA matrices.
        alpha: Their weight; by default twice the rank.
        dropout: Share of a LoRA input that is dropped.
        targets: Names of the linear layers that get one; all of them where empty.
        rslora: Divide alpha by the root of the rank (arXiv 2312.03732).
        dora: Train magnitudes beside directions (arXiv 2402.09353).
        train_norms: Train the norms too.
        train_embeddings: Train the input embeddings too.
        full: Train every weight, without LoRA.
        pack: "off": a sequence comes from one document; "run-on": documents are joined; "restart": they are joined,
            positions start again with each and attention stays inside it.
        short_share: Share of the steps that train at the short length.
        original_length: What the base was trained on before it was extended, where its files do not say it.
        short_length: Tokens of their sequences; by default the original context length.
        keep_short: Hold what the model says of sequences inside the trained window close to what its source says
            (arXiv 2502.07365).
        positions: "full", or "pose" to skip positions in short windows (arXiv 2309.10400).
        window: Tokens that a sequence has with pose; by default the original context length.
        attention: "full", or "shifted" for LongLoRA's groups while training (arXiv 2309.12307).
        group: Tokens in such a group; by default a quarter of a sequence.
        checkpointing: Keep no activations but each layer's input; by default for more than 4096 tokens.
        piece: Positions whose logits are computed at once; by default what takes 24 MiB, 256 MiB on an
            accelerator.
        seed: Decides order, initial weights and skips.
        save_every: Steps between two saves.
        eval_every: Steps between two evaluations, where there is data for them; by default at every save.
        keep_best: Take the save that was best on the evaluation data.
        patience: Stop after so many evaluations without a better one, and take the best.
        mlm_probability: Share of the tokens that an encoder must guess, 0 to 1.
        quantize: "4bit" to keep the frozen weights in 4 bits while training, as QLoRA (arXiv 2305.14314); needs
            bitsandbytes. What is merged are the checkpoint's own weights.
        context_parallel: Accelerators that share one sequence.
        dtype: Type of the frozen weights: auto (as saved, float32 on a CPU), bf16, fp16 or fp32.
        device: auto or cpu.
        report_to: none, tensorboard, wandb or trackio.
    """

    length: int | None = None
    start_length: int | None = None
    learn: str = "answers"
    steps: int = 200
    epochs: float | None = None
    batch_size: int = 8
    micro_batch: int = 1
    learning_rate: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.05
    optimizer: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    neftune: float | None = None
    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    rslora: bool = False
    dora: bool = False
    train_norms: bool = False
    train_embeddings: bool = False
    full: bool = False
    pack: str = "off"
    short_share: float = 0.2
    original_length: int | None = None
    short_length: int | None = None
    keep_short: bool = False
    positions: str = "full"
    window: int | None = None
    attention: str = "full"
    group: int | None = None
    checkpointing: bool | None = None
    piece: int | None = None
    seed: int = 0
    save_every: int = 50
    eval_every: int | None = None
    keep_best: bool = False
    patience: int | None = None
    mlm_probability: float = 0.15
    quantize: str = "none"
    context_parallel: int = 1
    dtype: str = "auto"
    device: str = "auto"
    report_to: str = "none"

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise CtxextError(f'{_option(name)} "{value}" is not known.', hint=f"Choose {', '.join(choices)}.")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CtxextError(f'{_option(name)} must be at least 1, not "{value}".')
        for name in _SHARES:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise CtxextError(f'{_option(name)} is a share from 0 to 1, not "{value}".')
        for name in ("learning_rate", "alpha", "neftune", "epochs", "mlm_probability"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise CtxextError(f'{_option(name)} must be above 0, not "{value}".')
        if self.device not in ("auto", "cpu"):
            raise CtxextError(f'"{self.device}" is not a device to train on.', hint="Choose auto or cpu.")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse choices that contradict each other."""
        if self.batch_size % self.micro_batch:
            raise CtxextError(f"--batch-size {self.batch_size} is no multiple of --micro-batch {self.micro_batch}.")
        if self.keeps_best and self.save_every % (self.eval_every or self.save_every):
            raise CtxextError(
                f"--save-every {self.save_every} is no multiple of --eval-every {self.eval_every}, so that the best "
                "might not have been saved."
            )
        if self.full and (self.dora or self.rslora or self.targets):
            raise CtxextError("--full trains every weight; --dora, --rslora and --targets are for LoRA.")
        if self.full and self.quantize != "none":
            raise CtxextError("--quantize is for LoRA; --full trains the weights themselves.")
        if self.context_parallel > 1 and (self.pack == "restart" or self.attention == "shifted"):
            raise CtxextError("--context-parallel goes without --pack restart and --attention shifted.")
        if self.context_parallel > 1 and self.keep_short:
            raise CtxextError("--keep-short goes without --context-parallel.")
        if self.window and self.positions != "pose":
            raise CtxextError("--window is for --positions pose.", hint="Add --positions pose, or use --length alone.")
        if self.group and self.attention != "shifted":
            raise CtxextError("--group is for --attention shifted.")
        if self.pack == "restart" and (self.positions, self.attention) != ("full", "full"):
            raise CtxextError("--pack restart goes with full positions and full attention only.")

    def settled(self, *, window: int, trained_length: int) -> "TrainingOptions":
        """The same options with everything filled in that depends on the base.

        Args:
            window: The context length that the base claims, in tokens.
            trained_length: The context it was trained on, in tokens.

        Raises:
            CtxextError: the lengths contradict each other.
        """
        length = self.length or window
        num_tokens = (self.window or trained_length) if self.positions == "pose" else length
        if self.start_length and self.start_length >= num_tokens:
            raise CtxextError(
                f"--start-length {self.start_length} is not below the {num_tokens} tokens of a sequence.",
                hint="Leave it out to train at one length.",
            )
        if num_tokens % (2 * self.context_parallel) and self.context_parallel > 1:
            raise CtxextError(
                f"{num_tokens} tokens cannot be shared by --context-parallel {self.context_parallel}.",
                hint=f"Use a multiple of {2 * self.context_parallel}.",
            )
        return dataclasses.replace(
            self,
            length=length,
            learning_rate=self.learning_rate or (2e-5 if self.full else 2e-4),
            alpha=self.alpha or 2.0 * self.rank,
            window=min(num_tokens, length) if self.positions == "pose" else None,
            short_length=min(self.short_length or trained_length, num_tokens),
            group=(self.group or max(2, num_tokens // 4)) if self.attention == "shifted" else None,
            checkpointing=num_tokens > 4096 if self.checkpointing is None else self.checkpointing,
        )

    @property
    def keeps_best(self) -> bool:
        """Whether the best save is taken, not the last one."""
        return self.keep_best or self.patience is not None

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence: the window with PoSE, otherwise the length."""
        found = self.window or self.length
        assert found is not None, "the options are not settled"
        return found

    def is_short(self, step: int) -> bool:
        """Whether a step trains at the short length, without skips; such steps are spread evenly."""
        useful = self.short_length != self.sequence_length or self.positions == "pose"
        return useful and int((step + 1) * self.short_share) > int(step * self.short_share)

    def length_of_step(self, step: int) -> int:
        """Tokens of a sequence in a step, counted from 0."""
        assert self.short_length is not None, "the options are not settled"
        lengths = [self.start_length or self.sequence_length]
        while 2 * lengths[-1] < self.sequence_length:
            lengths.append(2 * lengths[-1])
        if lengths[-1] < self.sequence_length:
            lengths.append(self.sequence_length)
        # Rounded up, so that the last step has the full length however few there are.
        length = lengths[-(-(step + 1) * len(lengths) // self.steps) - 1]
        return min(length, self.short_length) if self.is_short(step) else length

    def sequences_wanted(self) -> dict[int, int]:
        """How many sequences of each length all steps take together."""
        if self.epochs:
            # All of every length that a long run has.
            lengths = map(dataclasses.replace(self, steps=_MANY, epochs=None).length_of_step, range(_MANY))
            return dict.fromkeys([self.sequence_length, *lengths], 1 << 40)
        wanted = {self.sequence_length: 0}
        for length in map(self.length_of_step, range(self.steps)):
            wanted[length] = wanted.get(length, 0) + self.batch_size * (self.sequence_length // length)
        return {length: max(1, count) for length, count in wanted.items()}

    def for_data(self, num_sequences: int) -> "TrainingOptions":
        """The same options with the steps that the epochs come to.

        Args:
            num_sequences: How many sequences of the full length there are.
        """
        if not self.epochs:
            return self
        return dataclasses.replace(
            self, steps=max(1, math.ceil(self.epochs * num_sequences / self.batch_size)), epochs=None
        )

    def to_dict(self) -> dict[str, Any]:
        """As reports write it."""
        return {**dataclasses.asdict(self), "targets": list(self.targets)}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
