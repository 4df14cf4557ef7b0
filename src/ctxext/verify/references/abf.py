"""Adjusted base frequency: Xiong et al. 2023, section 4.1."""


def base(numbers, model):
    """The base as given."""
    return numbers["theta"]
