"""Reports whose pages a browser opens: of one model, of a comparison, and of thirty models at eight lengths."""

import random

from ctxext.tasks.settings import Settings
from records_by_hand import answers, facts, losses, report_of

LENGTHS = tuple(1024 * 2**power for power in range(8))
DEPTHS = tuple(number / 10 for number in range(11))
METHODS = "yarn ntk pi llama3 longrope dynamic mspoe self-extend rerope".split()  # noqa: SIM905
MARKUP = '<img src=x onerror="document.title=1">&amp;$x$'
STOCK = "HuggingFaceTB/SmolLM2-135M-Instruct"


def make(names, lengths, depths=DEPTHS, tasks=("needle", "ruler-vt", "perplexity", "short"), samples=4, **settings):
    """Return a report whose figures fall with the length, the more the later a model is named."""
    rng, trained = random.Random(0), lengths[0] * 2
    models, records = [], []
    for number, name in enumerate(names):
        extended = {"dtype": "bfloat16", "attention": "sdpa", "device": "cpu", "context_length": lengths[-1]}
        models.append(facts(name, source=names[0] if number else None, trained_length=trained, **extended))
        for length in lengths:
            chance = 1 - 0.9 * (number / len(names)) * length / lengths[-1]
            right = {depth: [int(rng.random() < chance) for _ in range(samples)] for depth in depths}
            records += [answers(name, length, depth, of_depth) for depth, of_depth in right.items()]
            if "ruler-vt" in tasks:
                records.append(answers(name, length, None, [chance, rng.random()], "ruler-vt"))
        if "perplexity" in tasks:
            rise, width = 2 * number / len(names), lengths[-1] // 32
            buckets = [[width * (2.2 + rise * at / 32 + 0.1 * rng.random()), width] for at in range(32)]
            sums = {str(length): [length * (2.2 + rise), length] for length in lengths[-2:]}
            for sample, text in enumerate(("books", "code")):
                by_text = {"width": width, "buckets": buckets, "lengths": sums, "text": text}
                records.append(losses(name, f"perplexity: {text}", lengths[-1], sample, **by_text))
        # The loss of the last model was not measured, nor that of the first against a source.
        if "short" in tasks and name != names[-1]:
            for sample in range(3):
                loss = [float(trained) * (2.5 + 0.01 * number + 0.1 * sample)]
                records.append(losses(name, "short", trained, sample, tokens=[trained], loss=loss))
    tasks = Settings(tasks=tasks, lengths=lengths, depths=depths, samples=samples, **settings)
    return report_of(models, records, tasks)


def large():
    """Return the report of thirty models at eight lengths."""
    ids = [f"somebody-else/SmolLM2-135M-Instruct-{method}-x{factor}" for factor in (4, 8, 16) for method in METHODS]
    ids += [f"another-organisation/SmolLM2-135M-Instruct-yarn-finetuned-on-books-{n}k" for n in (8, 16)]
    return make([STOCK, *ids], LENGTHS)


def comparison():
    """Return the report of a comparison, with its verdict."""
    report = make(["stock", "yarn", "self-extend"], LENGTHS[:3], DEPTHS[::5])
    verdict = "Use yarn: it answers 92 % (80–97) of the questions beyond 2048 tokens, stock 41 % (28–55)."
    return {**report, "comparison": {"verdict": verdict}}


def single():
    """Return the report of one model at one length, with one sample."""
    return make(["demo"], LENGTHS[:1], DEPTHS[:1], tasks=("needle",), samples=1)


def markup():
    """Return a report of models with markup in their names."""
    return make([MARKUP, f"{MARKUP}</script><script>document.title='run'</script>", "_plain"], LENGTHS[:2], DEPTHS[:2])


REPORTS = {"large": large, "comparison": comparison, "single": single, "markup": markup}
