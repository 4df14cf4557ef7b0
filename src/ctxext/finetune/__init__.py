"""Fine-tuning: a short LoRA run that makes a longer context work, and the merge into a portable checkpoint."""

import logging

from ctxext.finetune.merge import Merged, merge
from ctxext.finetune.options import Reporter, RunOptions, TrainingOptions
from ctxext.finetune.run import Finetuned, finetune

__all__ = ["Finetuned", "Merged", "Reporter", "RunOptions", "TrainingOptions", "finetune", "merge"]

# Trainer and peft import it wherever it is installed, and it logs which kernels it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
