"""Fine-tuning: a short LoRA run that makes a longer context work, merged into a portable checkpoint."""
