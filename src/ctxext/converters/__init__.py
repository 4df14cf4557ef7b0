"""Converting checkpoints: plan the files of the result, then write them."""
