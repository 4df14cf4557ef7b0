"""Does a checkpoint use its context? Tasks, scoring and plots."""
