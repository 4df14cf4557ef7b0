"""Files that a stranger wrote, read strictly: what is found is what a schema says, or one line says what is wrong."""

from ctxext.reading.schemas import checked
from ctxext.reading.strict import parse_json, parse_yaml, read_text

__all__ = ["checked", "parse_json", "parse_yaml", "read_text"]
