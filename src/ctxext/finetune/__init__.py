"""Fine-tuning: a short LoRA run that makes a longer context work, and the merge into a portable checkpoint."""

import logging

# Trainer and peft import it wherever it is installed, and it logs which kernels it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
