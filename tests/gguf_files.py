"""GGUF files by the description of the format, without llama.cpp's own writer."""

import struct


def packed(value):
    """A value with its type, by the kind of Python value: text, whole number, number, list of texts, truth value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    texts = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in value)
    return struct.pack("<IIQ", 9, 8, len(value)) + texts


def gguf_bytes(values, tensors, version=3, alignment=32):
    """A GGUF file by the format's description; `tensors` are names with bytes, all of type I8."""
    parts, offset = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(values))], 0
    for key, value in values.items():
        parts.append(struct.pack("<Q", len(key.encode())) + key.encode() + packed(value))
    for name, content in tensors.items():
        parts.append(struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, len(content), 24, offset))
        offset += len(content) + -len(content) % alignment
    head = b"".join(parts)
    body = b"".join(content + bytes(-len(content) % alignment) for content in tensors.values())
    return head + bytes(-len(head) % alignment) + body


def keys_of(architecture="llama", **more):
    """The keys of a small model."""
    values = {
        "general.architecture": architecture,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.block_count": 2,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["<s>", "a", "ä", "\N{GRINNING FACE}"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m }}{% endfor %}",
        "general.quantized": True,
    }
    return {**values, **{f"{architecture}.{name.replace('__', '.')}": value for name, value in more.items()}}


TENSORS = {
    "token_embd.weight": bytes(range(100)),
    "blk.0.attn_q.weight": bytes(range(64)),
    "output.weight": b"\x07" * 33,
}
