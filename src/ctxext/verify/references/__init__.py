"""Every method computed the plain way from its paper, by its name; README.md says which functions that takes."""

from . import attention, encodings, frequencies

REFERENCES = {**frequencies.REFERENCES, **attention.REFERENCES, **encodings.REFERENCES}
