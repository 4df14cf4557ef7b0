"""RULER v2 from small files, against its authors' rules, which this file writes down once more."""

import json
import random
import re
from collections import Counter

import pytest
from datasets import Dataset

from ctxext.api import Settings
from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.tasks.registry import GROUPS
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.ruler2_scores import SCORES
from hand_made import make_tokenizer

TASKS = {name.removeprefix("ruler2-"): name for name in GROUPS["ruler2"]}
ROOM = 1024


def make_choices(rng, count):
    def make_one():
        question = " \t ".join(prose.sentence(rng) for _ in range(rng.randint(1, 3)))
        choices = [prose.person_name(rng) for _ in range(3)] + [f"{prose.person_name(rng)}  or\n{{none}}"]
        return {"question": f"{question}\n", "subject": "any", "choices": choices, "answer": rng.randrange(4)}

    return [make_one() for _ in range(count)]


def make_hops(rng, count, pool):
    """Questions with ten documents of a pool, so that some documents are in several questions."""

    def make_one():
        documents = rng.sample(pool, 10)
        titles = [documents[7][0], documents[2][0], documents[2][0]]
        return {
            **{"id": "x", "question": f"Who saw {prose.object_name(rng)}?", "answer": prose.person_name(rng)},
            **{"supporting_facts": {"title": titles, "sent_id": [0, 0, 1]}, "level": "hard"},
            "context": {"title": [title for title, _ in documents], "sentences": [lines for _, lines in documents]},
        }

    return [make_one() for _ in range(count)]


@pytest.fixture(scope="module")
def rows():
    rng = random.Random(5)
    pool = [(f"Page {n}", [prose.sentence(rng), f" {prose.sentence(rng)}"]) for n in range(300)]
    return {
        **{"test": make_choices(rng, 25), "auxiliary_train": make_choices(rng, 120)},
        **{"validation": make_hops(rng, 25, pool[:100]), "train": make_hops(rng, 40, pool[100:])},
    }


@pytest.fixture(scope="module")
def folder(rows, tmp_path_factory):
    """MMLU as JSON lines and HotpotQA as parquet in two parts, as `hf download` leaves them."""
    folder = tmp_path_factory.mktemp("ruler2")
    for path in ("mmlu/all", "hotpotqa/distractor", "mmlu/.cache/all"):
        (folder / path).mkdir(parents=True)
    (folder / "mmlu" / ".cache" / "all" / "test.jsonl").write_text("no record")
    for name in ("test", "auxiliary_train"):
        (folder / "mmlu" / "all" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
    for name in ("validation", "train"):
        for part, half in enumerate((rows[name][:20], rows[name][20:])):
            Dataset.from_list(half).to_parquet(folder / "hotpotqa" / "distractor" / f"{name}-0000{part}-of-2.parquet")
    return folder


@pytest.fixture(scope="module")
def encoder():
    return Encoder(make_tokenizer())


def make_prompts(folder, encoder, length=2500, samples=4, tasks=("ruler2",), **options):
    """Prompts of tasks as text without the start token, and what their answers should contain."""
    settings = Settings(tasks=tasks, ruler2=folder, samples=samples, depths=(0.5,), **options)
    made = {}
    for task in settings.retrieval_tasks():
        prompts = [prompt for (prompt,) in make_questions(task, encoder, length, range(samples), settings)]
        texts = [encoder.tokenizer.decode(prompt.ids[:-ROOM]).removeprefix("<s>") for prompt in prompts]
        sizes = [len(prompt.ids) - ROOM for prompt in prompts]
        made[task.name.removeprefix("ruler2-")] = [
            *zip(texts, [prompt.answers for prompt in prompts], sizes, strict=True)
        ]
    return made


@pytest.fixture(scope="module")
def prompts(folder, encoder):
    return make_prompts(folder, encoder)


COPIED = "Please copy and paste the question"
OPENINGS = {
    "mk-niah-easy": f"Below are some questions. I will ask you to copy one of them. {COPIED} you find.",
    "mv-niah-easy": f"Below are some questions. I will ask you to copy some of them. {COPIED}s you find.",
    "mk-niah-hard": "Below are some questions. I will ask you to solve one of them. Please solve the question you find "
    "and make sure to put the answer (and only answer) inside \\boxed\\{\\}.",
    "qa-basic": "Below are some documents. I will give you a text at the end. Please find the document index of the "
    "text. Only give me the index without any document contents.",
    "qa-easy": "Below are some documents. I will give you a question at the end. Please find the index of the most "
    "relevant document that can help answer the question. Only give me the index without any document contents.",
    "qa-hard": "Below are some documents. I will ask you to answer a question based on the documents. Please answer "
    "the question.",
}
OPENINGS |= {"mk-niah-medium": OPENINGS["mk-niah-hard"], "qa-medium": OPENINGS["qa-hard"]}
OPENINGS |= dict.fromkeys(("mv-niah-medium", "mv-niah-hard"), OPENINGS["mk-niah-easy"])
SOLVE = "Please {0} the Question {1} from the context{2} with an answer from A, B, C, D."


@pytest.mark.parametrize("name", ["mk-niah-basic", "mv-niah-basic"])
def test_values_have_the_wording_and_the_keys_of_the_authors(name, prompts):
    several = name.startswith("mv")
    for text, answers, _ in prompts[name]:
        first, *lines, last = text.split("\n")
        said = [
            re.fullmatch(r"One of the special magic numbers for (\S+) is: (\d{10})\.", line).groups() for line in lines
        ]
        query = re.search(r"for (\S+) mentioned", last)[1]
        places = [place for place, (key, _) in enumerate(said) if key == query]
        assert len(places) == len(answers) == (4 if several else 1)
        assert {said[place][1] for place in places} == {*answers}
        assert places[-1] < len(said) - 1, "a needle precedes a unit of the haystack"
        frame = (
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
            "about the number afterwards.|What is the special magic number for {0} mentioned in the provided text? The "
            "special magic number for {0} mentioned in the provided text is"
        )
        if several:
            frame = frame.replace("A special magic number is", "Some special magic numbers are").replace(
                "number", "numbers"
            )
            frame = frame.replace("numberss", "numbers").replace("memorize it", "memorize them")
            frame = frame.replace("What is the", "What are all the").removesuffix("is") + "are"
        assert [first, last] == frame.format(query).split("|")
        if several:
            counts = Counter(key for key, _ in said if key != query)
            assert sum(counts.values()) % 4 == sum(count % 4 for count in counts.values()) % 4
            assert max(counts.values()) > 3


def collapse(row):
    text = row["question"] + "".join(
        f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)
    )
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("name", [name for name in TASKS if "niah" in name and "basic" not in name])
def test_questions_have_the_wording_and_the_numbers_of_the_authors(name, prompts, rows):
    tests = {collapse(row): "ABCD"[row["answer"]] for row in rows["test"]}
    trained = {collapse(row): "ABCD"[row["answer"]] for row in rows["auxiliary_train"]}
    used = set()
    for text, answers, _ in prompts[name]:
        blocks = text.split("\n\n")[1:]
        listed = [re.fullmatch(r"Question (\d{7}): (.*)", block) for block in blocks]
        count = listed.index(None)
        numbered = [found.groups() for found in listed[:count]]
        ((place, needle),) = [(n, words) for n, (_, words) in enumerate(numbered) if words in tests]
        assert all(words in trained for _, words in numbered[:place] + numbered[place + 1 :])
        number, used = numbered[place][0], used | {needle}
        alike = [words for other, words in numbered if other == number]
        rank = f"{alike.index(needle) + 1}{('st', 'nd', 'rd', 'th')[alike.index(needle)]} (1 indexed)"
        ask, expected = {
            "mk-niah-easy": (f"Please copy the Question {number} from the context.", [needle]),
            "mk-niah-medium": (SOLVE.format("copy", number, " and then solve it"), [tests[needle]]),
            "mk-niah-hard": (SOLVE.format("solve", number, ""), [tests[needle]]),
            "mv-niah-easy": (f"Please find and copy all the Question {number} from the context.", alike),
            "mv-niah-medium": (
                f"Please first copy all the Question {number} from the context and then copy the {rank} Question "
                f"{number} at the end.",
                [needle],
            ),
            "mv-niah-hard": (f"Please copy the {rank} Question {number} from the context.", [needle]),
        }[name]
        examples = []
        if "Solution:" in text:
            at = count + 1
            for block in blocks[at : at + 5]:
                shown = re.search(r"Question (\d{7})", block)[1]
                ((_, words),) = [pair for pair in numbered if pair[0] == shown]
                copied = f"\nQuestion {shown}: {words}" if name == "mk-niah-medium" else ""
                examples += [f"{ask.replace(number, shown)}{copied}\nSolution: \\boxed{{{trained[words]}}}"]
            assert number not in {re.search(r"\d{7}", example)[0] for example in examples}
            assert len({*examples}) == 5
            examples = ["Here are some examples to help you understand the task:", *examples]
            examples += ["Here is the actual task you need to solve:"]
        assert bool(examples) == (name in ("mk-niah-medium", "mk-niah-hard"))
        questions = [f"Question {shown}: {words}" for shown, words in numbered]
        assert text == "\n\n".join([OPENINGS[name], *questions, *examples, ask])
        assert list(answers) == expected
        counts, full = Counter(shown for shown, _ in numbered), 4 if name.startswith("mv") else 1
        assert max(counts.values()) == full
        assert len(counts) == -(-len(numbered) // full), "as few numbers as possible"
    assert len(used) == len(prompts[name]), "each sample has another question"


def documents_of(row):
    """The documents that support the answer, and the others."""
    support, sides = row["supporting_facts"]["title"], ([], [])
    for title, lines in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
        sides[title not in support].append(f"{title}\n" + "".join(lines))
    return sides


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("qa")])
def test_documents_have_the_wording_and_the_numbers_of_the_authors(name, prompts, rows):
    trained = {text for row in rows["train"] for side in documents_of(row) for text in side}
    for sample, (text, answers, _) in enumerate(prompts[name]):
        row = rows["validation"][sample]
        golds, others = documents_of(row)
        found = re.findall(r"Document (\d{7}):\n(.*\n.*)\n\n", text)
        by_text = {words: number for number, words in found}
        assert len({*by_text.values()}) == len(by_text) == len(found), "no document is there twice"
        assert {*golds, *others} <= by_text.keys()
        assert {*by_text} - {*golds, *others} <= trained
        ask = {
            "qa-basic": f"Text: {golds[0]}\nMost relevant document index:",
            "qa-easy": f"Question: {row['question']}\nIndex of the most relevant document that can help answer the "
            "question:",
            "qa-medium": "Please first find and copy paste the documents relevant to the following question and then "
            f"answer it based on the documents you find.\n\nQuestion: {row['question']}",
            "qa-hard": f"Please answer the following question based on the documents.\n\nQuestion: {row['question']}",
        }[name]
        listed = [f"Document {number}:\n{words}" for number, words in found]
        assert text == "\n\n".join([OPENINGS[name], *listed, ask])
        numbers = [by_text[words] for words in golds]
        assert list(answers) == {"qa-basic": numbers[:1], "qa-easy": numbers}.get(name, [row["answer"]])


def test_the_order_of_the_documents_is_random(prompts, rows):
    places = {
        text.index(documents_of(rows["validation"][n])[0][0]) for n, (text, _, _) in enumerate(prompts["qa-hard"])
    }
    places |= {text.index(answers[0]) for text, answers, _ in prompts["mk-niah-easy"]}
    assert len(places) == 8


def test_prompts_are_the_longest_that_fit(folder, encoder, prompts):
    assert {*prompts} == {*TASKS}
    longer = make_prompts(folder, encoder, length=6000, samples=1)
    for name in TASKS:
        room = 45 if "basic" in name and "niah" in name else 210
        for length, made in ((2500, prompts[name]), (6000, longer[name])):
            sizes = [size for _, _, size in made]
            assert length - room < min(sizes) <= max(sizes) <= length, (name, sizes)


def test_the_seed_decides_the_prompts(folder, encoder, prompts):
    same, others = (make_prompts(folder, encoder, samples=1, seed=seed) for seed in (0, 1))
    assert all(same[name] == prompts[name][:1] != others[name] for name in TASKS)


def test_the_size_is_an_upper_limit_and_refuses_lengths_that_are_too_short(folder, encoder):
    settings = Settings(tasks=("ruler2",), ruler2=folder, samples=2, depths=(0.5,))
    for task in settings.retrieval_tasks():
        assert check_fits(task, encoder, [2000], settings, 3024) == 2000 + ROOM
        with pytest.raises(CtxextError, match=r"have up to 3024 tokens with their answers"):
            check_fits(task, encoder, [2000], settings, 3023)
        with pytest.raises(CtxextError, match=rf'The task "{task.name}" needs at least \d+ tokens'):
            check_fits(task, encoder, [60], settings)


def test_a_haystack_is_repeated_if_it_is_short(folder, encoder, rows):
    ((text, _, size),) = make_prompts(
        folder, encoder, length=16_000, samples=1, tasks=("ruler2-mk-niah-easy",)
    ).popitem()[1]
    counts = Counter(re.findall(r"Question \d{7}: (.*)", text))
    found = sorted({counts[collapse(row)] for row in rows["auxiliary_train"]})
    assert size > 15_700
    assert len(found) <= 2 <= found[-1]
    assert found[-1] - found[0] <= 1


def test_the_users_words_are_the_keys(folder, encoder, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"word{n}" for n in range(60)))
    tasks = ("ruler2-mk-niah-basic", "ruler2-mv-niah-basic")
    for ((text, _, _),) in make_prompts(None, encoder, samples=1, tasks=tasks, words=tmp_path / "words.txt").values():
        assert {*re.findall(r"numbers for (\S+) is", text)} <= {
            f"word{a}-word{b}" for a in range(60) for b in range(60)
        }


def edit_distance(first, second):
    """By the recursive definition, with a memory."""
    known = {}

    def measure(a, b):
        if not a or not b:
            return a + b
        if (a, b) not in known:
            least = min(measure(a - 1, b), measure(a, b - 1)) + 1
            known[a, b] = min(least, measure(a - 1, b - 1) + (first[a - 1] != second[b - 1]))
        return known[a, b]

    return measure(len(first), len(second))


def score_by_hand(match, text, expected):
    if match == "2steps":
        text = text[text.rindex("\n\n") + 2 :] if "\n\n" in text else text
    if match == "part":
        lines, rest = text.split("\n"), []
        while lines:
            head = re.search(r"Document \d+:", lines[0])
            # A document ends with an empty line after at least one line; without one it is no copy.
            end = next((n for n in range(1, len(lines) - 1) if not lines[n]), None)
            if head and end:
                rest.append(lines[0][: head.start()] + lines[end + 1])
                lines = [rest.pop(), *lines[end + 2 :]]
            else:
                rest.append(lines.pop(0))
        text = "\n".join(rest)
    scores = []
    for part in expected:
        words, reference = text.lower().split(), part.lower().split()
        scores.append(max(float(part.lower() in text.lower()), 1 - edit_distance(words, reference) / len(reference), 0))
    return max(scores) if match == "part" else sum(scores) / len(scores)


def vary(rng, expected):
    """An answer with some of the expected texts, other words, documents and lines."""
    words = rng.choice(expected).split()
    parts = ["", *expected, expected[0].upper(), "It is", "Document 7654321:\nTitle\nA text.", "Document 12: same line"]
    parts += [" ".join(word for word in words if rng.random() < 0.8), " ".join(rng.sample(words, len(words)))]
    return rng.choice(("\n", "\n\n", " ", "")).join(rng.choices(parts, k=rng.randint(0, 4)))


def test_scores_of_600_answers_with_copies():
    rng, seen = random.Random(2), {}
    for _ in range(200):
        texts = [prose.sentence(rng), prose.sentence(rng), prose.person_name(rng), str(rng.randrange(10**6, 10**7))]
        expected = rng.sample(texts, rng.randint(1, 2))
        for match in ("all", "2steps", "part"):
            text = vary(rng, expected)
            score = score_by_hand(match, text, expected)
            assert SCORES[match].compute(text, expected) == pytest.approx(score, abs=1e-12), (match, text, expected)
            seen.setdefault(match, set()).add(score)
    assert all(0 in of_match and 1 in of_match and len(of_match) >= 10 for of_match in seen.values())


def choice_by_hand(text):
    boxed, at = None, text.rfind("\\boxed")
    if at >= 0 and text[at + 6 : at + 7] == "{":
        depth = 0
        for end in range(at + 6, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                boxed = text[at + 7 : end]
                break
    final = re.search(r"(?s).*The final answer is ([^\n]+)\n?\Z", text)
    chosen = boxed or (final[1] if final else "")
    for letter, foreign in zip("ABCD", ("أঅＡ", "بবＢ", "جডＣ", "دঢＤ"), strict=True):
        chosen = re.sub(f"[{foreign}]", f" {letter}", chosen)
    chosen = chosen.strip()
    if len(chosen) == 1:
        return chosen.upper()
    capitals = [
        c
        for before, c, after in zip(f" {chosen}", chosen, f"{chosen[1:]} ", strict=False)
        if c in "ABCDE" and not (before.isalnum() or before == "_" or after.isalnum() or after == "_")
    ]
    if capitals:
        return capitals[-1]
    labeled = re.findall(r"answer[*_]{0,2}\s*:[\s*_]{0,2}\s*([a-z])(?![a-z0-9])", text.lower())
    return labeled[-1].upper() if labeled else None


def test_choices_of_600_answers():
    rng, right = random.Random(3), 0
    forms = [
        *(
            r"\boxed{0}",
            r"\boxed{\text{D} 0}",
            r"\boxed{{0}}",
            r"\boxed{\text{{0}}}",
            r"\boxed {0}",
            r"\boxed{0",
            r"\boxed{}",
            r"\boxed{a b}",
        ),
        *("The final answer is 0", "The final answer is (0).\n", "The final answer is 0\nor not", "It is 0.", "0"),
        *("**Answer**: 0", "answer: 0x", "Answer:\n0", "__ANSWER__ : _0_", "Answer: none", r"\boxed{0. B_C Xena}", ""),
        *(r"\boxed{أ}", r"\boxed{ব}", r"\boxed{Ｃ}", r"\boxed{(د)}", r"\boxed{ }"),
    ]
    for _ in range(600):
        used = [form.replace("0", rng.choice("ABCDabE")) for form in rng.choices(forms, k=rng.randint(1, 3))]
        text = rng.choice(("\n", " ", "\n\n")).join(used)
        for expected in "ABCD":
            score = SCORES["multichoice"].compute(text, (expected,))
            assert score == (choice_by_hand(text) == expected), (text, choice_by_hand(text))
            right += score
    assert 250 < right < 550


def test_a_task_grades_by_its_score(folder, encoder):
    settings = Settings(tasks=("ruler2",), ruler2=folder, depths=(0.5,))
    matches = {}
    for task in settings.retrieval_tasks():
        ((prompt,),) = make_questions(task, encoder, 2000, [0], settings)
        matches[task.name.removeprefix("ruler2-")] = task.match
        right = f"\\boxed{{{prompt.answers[0]}}}" if task.match == "multichoice" else " ".join(prompt.answers)
        assert (task.grade(right, prompt), task.grade("Zyx.", prompt)) == (1, 0)
        assert prompt.num_answer == ROOM
    assert matches == {
        **dict.fromkeys(TASKS, "all"),
        **dict.fromkeys(("mk-niah-medium", "mk-niah-hard"), "multichoice"),
        **{"mv-niah-medium": "2steps", **{name: "part" for name in TASKS if name.startswith("qa")}},
    }


def test_a_long_answer_is_scored_at_once():
    """The word error rate of an answer with twice the words is at least 1."""
    assert SCORES["all"].compute("word " * 100_000, ("a b c " * 300,)) == 0


def refuse(tmp_path, **options):
    def check():
        settings = Settings(samples=1, depths=(0.5,), **options)
        for task in settings.retrieval_tasks():
            check_fits(task, Encoder(make_tokenizer()), [2000], settings)

    with pytest.raises(CtxextError) as error:
        check()
    assert "\n" not in error.value.message
    assert "hf download cais/mmlu" in error.value.hint
    return error.value.message.replace(str(tmp_path), "")


def test_missing_folders_are_reported_with_the_download_command(tmp_path):
    assert refuse(tmp_path, tasks=("ruler2",)).startswith(
        'The task "ruler2-mk-niah-easy" needs the files of its authors'
    )
    assert refuse(tmp_path, tasks=("ruler2",), ruler2=tmp_path / "no") == 'There is no folder "/no".'
    assert refuse(tmp_path, tasks=("ruler2-qa-hard",), ruler2=tmp_path) == '"" contains no file distractor/train*.'
    Settings(tasks=("ruler2-mk-niah-basic", "ruler2-mv-niah-basic"))


WRONG = {
    "test": [
        ({"answer": 4}, ': "answer" is "4", expected'),
        ({"answer": True}, ': "answer" is "True", expected a valid integer.'),
        ({"choices": ["a", "b", "c"]}, ": \"choices\" is \"['a', 'b', 'c']\", expected at least 4 entries."),
        ({"question": None}, ': "question" is "None", expected a valid string.'),
    ],
    "validation": [
        ({"answer": " "}, ': "answer" is "\' \'", expected text that is not empty.'),
        ({"context": {"title": ["a"]}}, ' lacks "context.sentences".'),
        ({"context": [["a", ["b"]]]}, ": \"context\" is \"[['a', ['b']]]\", expected an object."),
        ({"supporting_facts": {"title": ["b"]}}, ' has no document of its "supporting_facts".'),
    ],
}


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in WRONG for number in range(4)])
def test_wrong_records_are_reported_with_their_line(name, number, tmp_path):
    change, message = WRONG[name][number]
    choice = {"question": "Who?", "choices": ["a", "b", "c", "d"], "answer": 0}
    hop = {"question": "Who?", "answer": "Ann", "supporting_facts": {"title": ["a"]}}
    hop["context"] = {"title": ["a"], "sentences": [["Ann."]]}
    rows = {**dict.fromkeys(("test", "auxiliary_train"), choice), **dict.fromkeys(("validation", "train"), hop)}
    for file, row in rows.items():
        place = tmp_path / ("all" if "choices" in row else "distractor")
        place.mkdir(exist_ok=True)
        lines = [row, row | change if file == name else row]
        (place / f"{file}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = "ruler2-mk-niah-easy" if name == "test" else "ruler2-qa-hard"
    expected = f'Line 2 of "/{"all" if name == "test" else "distractor"}/{name}.jsonl"{message}'
    assert refuse(tmp_path, tasks=(task,), ruler2=tmp_path).startswith(expected)


def test_more_samples_than_questions_are_refused(folder, encoder):
    settings = Settings(tasks=("ruler2-qa-hard", "ruler2-mk-niah-hard"), ruler2=folder, samples=26, depths=(0.5,))
    for task in settings.retrieval_tasks():
        with pytest.raises(CtxextError, match=f'contains 25 questions for "{task.name}"'):
            check_fits(task, encoder, [2000], settings)


def test_the_report_names_the_material(folder):
    told = Settings(tasks=("ruler2-qa-hard",), ruler2=folder).to_dict()["ruler2"]
    assert told["name"] == folder.name
    assert len(told["sha256"]) == 64
