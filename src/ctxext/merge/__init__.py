"""Merging trained weights into a portable checkpoint, tensor by tensor."""

import logging

# peft imports it wherever it is installed, as transformers' Trainer does, and it logs which kernels it lacks.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
