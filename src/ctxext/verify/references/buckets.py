"""Buckets of distances: T5 (1910.10683), section 2.1, and its code in Mesh TensorFlow."""

import math


def bucket(numbers, source, relative):
    """The bucket of a key `relative` tokens after the query, before it is rounded down.

    `source` has the source's `distance`, and of its stack `num_buckets` and whether it is `bidirectional`.
    """
    distance, count, first = source["distance"] * numbers["factor"], source["num_buckets"], 0
    if source["bidirectional"]:
        count, first = count // 2, count // 2 if relative > 0 else 0
    away = abs(relative) if source["bidirectional"] else max(-relative, 0)
    exact = count // 2
    if away < exact:
        return first + away
    place = exact + math.log(away / exact) / math.log(distance / exact) * (count - exact)
    return first + min(place, count - 1)
