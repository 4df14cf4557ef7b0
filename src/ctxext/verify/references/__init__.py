"""Each method by name, implemented directly from its paper; README.md lists the functions that it needs."""

from . import attention, encodings, frequencies

REFERENCES = {**frequencies.REFERENCES, **attention.REFERENCES, **encodings.REFERENCES}
