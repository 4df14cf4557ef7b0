"""Dual chunk attention: An et al. 2024, sections 3.1 to 3.3."""

from .rows import angles, places_of, temperature

__all__ = ["places", "relation", "temperature"]


def relation(settings, layer, m, n, frequencies):
    """Keys of the same chunk at their true distance; the chunk before and earlier ones have other rules."""
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]
    # Within a chunk the paper reads both at their place in it, which is the same distance.
    if m < size or m // chunk == n // chunk:
        return [m * w for w in frequencies], [n * w for w in frequencies]
    if m // chunk == n // chunk + 1:  # The paper reads the key at n mod c: both moved alike.
        return angles(min(m % chunk + chunk, size) + n // chunk * chunk, frequencies), angles(n, frequencies)
    return angles(size, frequencies), angles(n % chunk, frequencies)


def places(settings, reach):
    """Around the borders of the row's chunk and of the one before, and the rows at which chunks begin."""
    size, chunk = settings["chunk_size"], settings["chunk_size"] - settings["local"]

    def borders(row):
        return [row // chunk * chunk, (row // chunk - 1) * chunk]

    first = max(settings["original_length"], size)
    return places_of(reach, first, borders, range(-(-size // chunk) * chunk, reach, chunk))
