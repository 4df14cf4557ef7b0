"""Fine-tuning: a short LoRA run that makes a longer context work, and the merge into a portable checkpoint."""

import logging
from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.finetune.merge import Merged, merge
    from ctxext.finetune.options import Reporter, RunOptions, TrainingOptions
    from ctxext.finetune.run import Finetuned, finetune
    from ctxext.finetune.training_data import TrainingData

__all__ = ["Finetuned", "Merged", "Reporter", "RunOptions", "TrainingData", "TrainingOptions", "finetune", "merge"]

_NAMES = {
    "Merged": "ctxext.finetune.merge",
    "merge": "ctxext.finetune.merge",
    "Reporter": "ctxext.finetune.options",
    "RunOptions": "ctxext.finetune.options",
    "TrainingData": "ctxext.finetune.training_data",
    "TrainingOptions": "ctxext.finetune.options",
    "Finetuned": "ctxext.finetune.run",
    "finetune": "ctxext.finetune.run",
}
hand_on(__name__, _NAMES, main="finetune")

# Trainer and peft import it wherever it is installed, and it logs which kernels it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
