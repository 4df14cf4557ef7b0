"""Merge of trained weights into a portable checkpoint, tensor by tensor."""

import logging

# peft and transformers' Trainer import it if it is installed, and it logs missing kernels.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
