"""Which functions are a method's reference; README.md explains their names."""

from types import SimpleNamespace as Reference

from . import attention, encodings, frequencies
from .attention import temperature

REFERENCES = {
    "pi": Reference(schedule=frequencies.pi),
    "ntk": Reference(schedule=frequencies.ntk),
    "abf": Reference(base=frequencies.abf),
    "ntk-by-parts": Reference(schedule=frequencies.ntk_by_parts),
    "yarn": Reference(schedule=frequencies.yarn),
    "llama3": Reference(schedule=frequencies.llama3),
    "longrope": Reference(schedule=frequencies.longrope),
    "mrrope": Reference(schedule=frequencies.mrrope),
    "resonance": Reference(schedule=frequencies.resonance),
    "cope": Reference(schedule=frequencies.cope),
    "dynamic": Reference(schedule=frequencies.dynamic),
    "mspoe": Reference(choose=frequencies.choose, rotation=frequencies.mspoe, loudness=frequencies.loudness),
    "self-extend": Reference(
        relation=attention.self_extend, places=attention.self_extend_places, temperature=temperature
    ),
    "bifocal": Reference(relation=attention.bifocal, places=attention.bifocal_places, temperature=temperature),
    "dca": Reference(relation=attention.dca, places=attention.dca_places, temperature=temperature),
    "rerope": Reference(relation=attention.rerope, places=attention.rerope_places, temperature=temperature),
    "string": Reference(relation=attention.string, places=attention.string_places, temperature=temperature),
    "adaptive": Reference(
        relation=attention.adaptive,
        rotated_factor=attention.adaptive_rotated_factor,
        places=attention.adaptive_places,
        temperature=temperature,
    ),
    "sinks": Reference(relation=attention.sinks, places=attention.sinks_places, temperature=temperature),
    "window": Reference(relation=attention.window, places=attention.window_places, temperature=temperature),
    "distance-aware": Reference(
        relation=attention.in_place, factor=attention.distance_aware, temperature=attention.no_temperature
    ),
    "table": Reference(rows=encodings.table, original=encodings.table_original),
    "range": Reference(rows=encodings.sinusoidal, original=encodings.sinusoidal_original),
    "ntk-alibi": Reference(slopes=encodings.ntk_alibi),
    "alibi-interpolation": Reference(slopes=encodings.alibi_interpolation),
    "buckets": Reference(bucket=encodings.bucket),
}
