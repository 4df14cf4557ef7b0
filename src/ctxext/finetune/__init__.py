"""Fine-tuning: a short LoRA run for a longer context, merged into a portable checkpoint."""
