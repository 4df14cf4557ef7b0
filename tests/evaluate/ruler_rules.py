"""RULER's rules in other words than the package's: each function reads the material out of a prompt and writes it anew.

A rule takes a prompt without its answer and padding, and returns what the rule makes of the same material, with the
answers. It holds for NVIDIA's prompts and for the package's.
"""

import itertools
import math
import random
import re

BUDGETS = {"niah": 128, "ruler-vt": 30, "ruler-cwe": 120, "ruler-fwe": 50, "ruler-qa": 32}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.")
KINDS = {  # Haystack, keys, values of each key, keys in the question.
    "niah-single-1": ("repeat", 1, 1, 1),
    "niah-single-2": ("prose", 1, 1, 1),
    "niah-single-3": ("prose", 1, 1, 1),
    "niah-multikey-1": ("prose", 4, 1, 1),
    "niah-multikey-2": ("needles", 1, 1, 1),
    "niah-multikey-3": ("needles", 1, 1, 1),
    "niah-multivalue": ("prose", 1, 4, 1),
    "niah-multiquery": ("prose", 4, 1, 4),
}


def rewrite(name, text, length, seed, source=None):
    """Return the prompt by the rule, and the parts or answers that are correct."""
    if name.startswith("niah"):
        return rewrite_niah(name, text, source)
    if name.startswith("ruler-qa"):
        return rewrite_questions(text, source)
    return {"ruler-vt": rewrite_variables, "ruler-cwe": rewrite_common, "ruler-fwe": rewrite_frequent}[name](
        text, length, seed
    )


def budget(name):
    return next(tokens for task, tokens in BUDGETS.items() if name.startswith(task))


def string_match_all(text, parts):
    return sum(1 for part in parts if text.lower().find(part.lower()) >= 0) / len(parts)


def string_match_part(text, parts):
    return 1.0 if any(text.lower().find(part.lower()) >= 0 for part in parts) else 0.0


def unshuffle(items, seed):
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    before = [None] * len(items)
    for place, index in enumerate(order):
        before[index] = items[place]
    return before, order


def rewrite_niah(name, text, essays):
    haystack, num_keys, num_values, num_queries = KINDS[name]
    context = text.split("afterwards.\n", 1)[1].rsplit("\nWhat", 1)[0]
    asked = re.search(r"magic (?:numbers?|uuids?) for (.+) mentioned in the provided text\? The", text)[1]
    queries = asked.replace(", and ", ", ").split(", ")
    needles = NEEDLE.findall(context)
    values = {key: [value for _, known, value in needles if known == key] for key in queries}
    assert len(queries) == num_queries
    assert all(len(of_key) == num_values for of_key in values.values())
    kind = needles[0][0]
    if haystack == "prose":
        assert len(needles) == num_keys * num_values
        prose = " ".join(NEEDLE.sub("", context).split())
        if essays is not None:
            assert " ".join([" ".join(essays.split())] * 3).startswith(prose)
        context = context.strip()
        text = text.replace("afterwards.\n ", "afterwards.\n")
    else:
        lines = context.split("\n")
        fillers = [line for line in lines if line == NOISE]
        assert len(fillers) == (len(lines) - 1 if haystack == "repeat" else 0)
        assert all(line == NOISE or NEEDLE.fullmatch(line) for line in lines)
    one = num_queries * num_values == 1
    kind = kind[:-1] if one else kind
    some, be, what = ("A", "is", "What is") if one else ("Some", "are", "What are all")
    written = (
        f"{some} special magic {kind} {be} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {kind} afterwards.\n{context}\n{what} the special magic {kind} for {asked} mentioned in the "
        f"provided text? The special magic {kind} for {asked} mentioned in the provided text {be}"
    )
    return written, [value for key in queries for value in values[key]]


def rewrite_variables(text, length, seed):
    head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    written = []
    parts = text.split(head)[1:]
    assert len(parts) == (2 if length >= 1024 else 1)
    for number, part in enumerate(parts):
        lines = part.split("\nQuestion")[0].split("\n")
        places = [index for index, line in enumerate(lines) if line.startswith("VAR")]
        fillers = [line for line in lines if not line.startswith("VAR")]
        assert set(fillers) == {NOISE}
        assert all(before + 1 < after for before, after in itertools.pairwise(places))
        assert places[-1] < len(lines) - 1, "lines are inserted before a filler"
        names = [lines[place].split(" ")[1] for place in places]
        value = lines[places[0]].split(" ")[3]
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        for place, line in zip(places, chain, strict=True):
            fillers.insert(place, line)
        assert len({*names}) == 5
        assert {len(one) for one in names} == ({3} if number < len(parts) - 1 else {5})
        written.append(
            head + "\n".join(fillers) + f"\nQuestion: Find all variables that are assigned the value {value} in the "
            "text above. Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
            f"assigned the value {value}, they are: " + (f" {' '.join(names)}\n" if number < len(parts) - 1 else "")
        )
    return "\n".join(written), names


def rewrite_common(text, length, seed):
    rules = [(10, 3), (30, 3)] if length >= 4096 else [(3, 1), (6, 1)] if length >= 1024 else [(3, 1)]
    written = []
    lists = re.findall(r"appear most often\.\n(.+)\nQuestion", text)
    assert len(lists) == len(rules)
    for number, (listed, (often, seldom)) in enumerate(zip(lists, rules, strict=True)):
        words = re.split(r" ?\d+\. ", listed)[1:]
        before, order = unshuffle(words, seed)
        common, others = before[:10], before[10 * often :][: (len(words) - 10 * often) // seldom]
        assert len({*common, *others}) == len(common) + len(others)
        is_last = number == len(lists) - 1
        assert is_last or len(others) == {10: 30, 3: 10}[often]
        unshuffled = common * often + others * seldom
        again = " ".join(f"{place}. {unshuffled[index]}" for place, index in enumerate(order, 1))
        answer = " ".join(f"{place}. {word}" for place, word in enumerate(common, 1))
        written.append(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{again}\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:" + ("" if is_last else f" {answer}")
        )
    return "\n".join(written), common


def rewrite_frequent(text, length, seed):
    listed = text.split("coded words. ")[1].split("\nQuestion")[0].split(" ")
    before, order = unshuffle(listed, seed)
    ranked = list(dict.fromkeys(before))
    counts = [before.count(word) for word in ranked]
    assert ranked[0] == "..."
    size = max(4, (length - 50) // 50)
    places = list(range(size))
    random.Random(seed).shuffle(places)
    alphabetical = [word for _, word in sorted(zip(places[1:], ranked[1:], strict=False))]
    assert alphabetical == sorted(alphabetical), "the vocabulary is sorted, then shuffled in the same way for all"
    total = next(
        total
        for total in range(len(listed), 2 * len(listed))
        if [int(total * rank**-2.0 / (math.pi**2 / 6)) for rank in range(1, len(ranked) + 1)] == counts
    )
    shares = [int(total / rank**2 / (math.pi**2 / 6)) for rank in range(1, size + 1)]
    unshuffled = [word for word, share in zip(ranked, shares, strict=False) for _ in range(share)]
    written = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(unshuffled[index] for index in order)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above "
        "coded text? Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return written, ranked[1:4]


def rewrite_questions(text, source):
    """The source maps a question to its answers, the documents that are always there, and those that come first."""
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    question = re.search(r"Question: (.+) Answer:$", text)[1]
    context = text.split("given documents.\n\n", 1)[1].rsplit(f"\n\n{order}", 1)[0]
    documents = re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:]
    answers = None
    if source is not None:
        answers, always, first, known = source[question]
        assert {*always} <= {*documents} <= known
        assert len({*documents}) == len(documents)
        others = {*documents} - {*always} - {*first}
        assert not others or {*first} <= {*documents}, "others only follow the related ones"
    numbered = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    written = f"{order}\n\nThe following are given documents.\n\n{numbered}\n\n{order}\n\nQuestion: {question} Answer:"
    return written, answers
