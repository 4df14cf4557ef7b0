"""Running a model on prompts and seeing whether it was right: in one forward, with shared beginnings, or by writing."""
