"""Every method computed the plain way from its paper, by its name; README.md lists the functions that it needs."""

from . import attention, encodings, frequencies

REFERENCES = {**frequencies.REFERENCES, **attention.REFERENCES, **encodings.REFERENCES}
