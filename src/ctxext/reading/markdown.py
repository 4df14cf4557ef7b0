"""Words of strangers on a page: on one line, and neither a tag, nor a picture, nor a table's edge."""

import re


def in_markdown(text: str) -> str:
    """A word as it may stand in a model card, whoever wrote it."""
    line = re.sub(r"[\x00-\x20\x7f-\x9f\u2028-\u202e\u2066-\u2069]+", " ", text)
    return line.replace("<", "&lt;").replace("![", "!&#91;").replace("|", "&#124;")
