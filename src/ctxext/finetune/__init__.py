"""Fine-tuning: a short LoRA run that makes a longer context work, and the merge into a portable checkpoint."""

import logging
from typing import TYPE_CHECKING

from ctxext.lazy import hand_on

if TYPE_CHECKING:
    from ctxext.finetune.merge import Merged as Merged
    from ctxext.finetune.merge import merge as merge
    from ctxext.finetune.options import Reporter as Reporter
    from ctxext.finetune.options import RunOptions as RunOptions
    from ctxext.finetune.options import TrainingOptions as TrainingOptions
    from ctxext.finetune.run import Finetuned as Finetuned
    from ctxext.finetune.run import finetune as finetune
    from ctxext.finetune.training_data import TrainingData as TrainingData

__all__ = hand_on(__name__, main="finetune")

# Trainer and peft import it wherever it is installed, and it logs which kernels it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
