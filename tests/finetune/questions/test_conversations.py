"""Conversations about texts: their facts, questions, lengths and order."""

import random
import re

import pytest
from transformers import AutoTokenizer

from chat_tokenizers import tokenizer_for
from ctxext.errors import CtxextError
from ctxext.finetune.questions.conversations import QuestionStream
from ctxext.finetune.questions.languages import read_languages
from ctxext.finetune.record_encoder import RecordEncoder
from question_texts import PARAGRAPHS, UNKNOWN, write_story

CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = ('"story.txt"', write_story(400))


def make_tokenizer(template=CHAT):
    """A tokenizer of bytes, with or without a chat template."""
    tokenizer = tokenizer_for("questions", CHAT)
    tokenizer.chat_template = template
    return tokenizer


def make_stream(lengths, template=CHAT, seed=0):
    return QuestionStream(RecordEncoder(make_tokenizer(template), only_answers=True), lengths, seed)


def make(texts, lengths=None, **options):
    return [each for each in make_stream(lengths or {4000: 1}, **options).make(texts) if each]


def text_of(conversation):
    return conversation.messages[0]["content"]


def turns_of(conversation):
    contents = [message["content"] for message in conversation.messages]
    return list(zip(contents[::2], contents[1::2], strict=True))


def facts_in(text, language=None):
    """The facts in a text, by the number of their form."""
    language = language or read_languages()["en"]
    values = {name: "|".join(map(re.escape, all_values(slot))) for name, slot in language.slots.items()}
    found = []
    for number, form in enumerate(language.facts):
        pattern = re.escape(form.fact)
        for name, choices in {**values, "number": r"\d+"}.items():
            pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{choices})")
        found += [(number, match) for match in re.finditer(pattern, text)]
    return found


def all_values(slot):
    return sorted(slot.sample(random.Random(0), slot.size), key=len, reverse=True)


def as_data(conversations):
    return [(each.messages, list(each.document.ids), each.document.is_learned) for each in conversations]


def test_the_same_seed_gives_the_same_conversations():
    texts = [STORY, ('"more.txt"', write_story(300, start=1000))]
    first, again, other = (as_data(make(texts, {3000: 2, 6000: 1}, seed=seed)) for seed in (1, 1, 2))
    assert len(first) > 10
    assert first == again
    assert first[:5] != other[:5]


@pytest.mark.parametrize("template", [CHAT, None], ids=["chat", "plain"])
@pytest.mark.parametrize("length", [500, 2000, 6000])
def test_conversations_are_close_to_their_length(template, length):
    conversations = make([STORY], {length: 1}, template=template)
    sizes = [len(each.document.ids) for each in conversations]
    assert max(sizes) <= length
    if length >= 2000:
        assert sum(sizes[:-1]) / len(sizes[:-1]) > 0.9 * length


def test_questions_are_left_out_of_a_conversation_that_is_too_long():
    """This template adds more tokens to every further message, which the estimate cannot include."""
    growing = CHAT.replace("'|>' +", "'|>' + 'x' * (loop.index0 * 3) +")
    conversations = make([STORY], {4000: 1}, template=growing)
    assert 3000 < max(len(each.document.ids) for each in conversations) <= 4000
    usual = make([STORY], {4000: 1})
    assert sum(each.num_questions for each in conversations) < sum(each.num_questions for each in usual)


def test_each_length_is_made_in_its_proportion():
    sizes = [len(each.document.ids) for each in make([STORY] * 6, {1500: 3, 6000: 1})]
    num_short = sum(size <= 1500 for size in sizes)
    assert 0.6 < num_short / len(sizes) < 0.9


def test_a_conversation_is_rendered_as_one_in_a_file():
    """The tokens are those of the rendered messages, and all answers with their ends are learned."""
    tokenizer = make_tokenizer()
    for conversation in make([STORY])[:5]:
        text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
        assert list(conversation.document.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
        pairs = zip(conversation.document.ids, conversation.document.is_learned, strict=True)
        learned = tokenizer.decode([token for token, is_learned in pairs if is_learned])
        assert learned == "".join(f"{answer}</s>" for _, answer in turns_of(conversation))


def test_without_a_chat_template_it_is_plain_text():
    tokenizer = make_tokenizer(None)
    for code, words in (("en", ("Question:", "Answer:")), ("zh", ("问题：", "答案："))):
        text = STORY[1] if code == "en" else PARAGRAPHS[code] * 20
        conversation = make([("a", text)], template=None)[0]
        whole = tokenizer.decode(conversation.document.ids)
        turns = turns_of(conversation)
        space = " " if code == "en" else ""
        assert whole.endswith(f"{words[1]}{space}{turns[-1][1]}\n</s>")
        assert whole.count(words[1]) == len(turns)
        pairs = zip(conversation.document.ids, conversation.document.is_learned, strict=True)
        learned = tokenizer.decode([token for token, is_learned in pairs if is_learned])
        assert learned == "".join(f"{space}{answer}\n" for _, answer in turns) + "</s>"


@pytest.mark.parametrize("code", read_languages())
def test_every_answer_is_in_the_text(code):
    """A fact that is named in the question has the value of the answer; a continuation follows in the text."""
    language = read_languages()[code]
    sentences = re.findall(r"\S[^.。]+[.。]", PARAGRAPHS[code].replace("\n", language.space))
    # Each once: continuations are made only of passages that occur once.
    text = language.space.join(f"{number}{language.space}{each}" for number in range(12) for each in sentences)
    conversations = make([("a", text)], {9000: 1})
    kinds = set()
    for conversation in conversations:
        assert conversation.language == language.name
        whole = text_of(conversation)
        for question, answer in turns_of(conversation):
            matching = [
                match
                for number, match in facts_in(whole, language)
                if language.facts[number].question.format(**match.groupdict()) in question
                and language.facts[number].answer.format(**match.groupdict()) == answer
            ]
            kinds.add(bool(matching))
            assert matching or answer in " ".join(whole.split()), (question, answer)
            if matching:
                assert len(matching) == 1
    assert kinds == {True, False}


def test_facts_are_among_look_alikes_and_some_are_not_questions():
    conversations = make([STORY])
    forms = [[number for number, _ in facts_in(text_of(each))] for each in conversations]
    assert all(1 <= len({*numbers}) <= 3 for numbers in forms)
    assert sum(max(map(numbers.count, numbers)) >= 3 for numbers in forms) > 0.9 * len(forms)
    for conversation, numbers in zip(conversations, forms, strict=True):
        assert conversation.num_questions == len(turns_of(conversation))
        assert len(numbers) > sum("On page" not in question[-250:] for question, _ in turns_of(conversation)[1:])
    assert len({number for numbers in forms for number in numbers}) == len(read_languages()["en"].facts)


def test_facts_are_at_all_places():
    places = []
    for conversation in make([STORY] * 3):
        text = text_of(conversation)
        places += [match.start() / len(text) for _, match in facts_in(text)]
    assert len(places) > 100
    assert all(sum(low <= place < low + 0.25 for place in places) > 0.1 * len(places) for low in (0, 0.25, 0.5, 0.7))


def test_two_fifths_of_the_questions_continue_the_text():
    turns = [turn for each in make([STORY] * 3, {6000: 1}) for turn in turns_of(each)]
    num_quotes = sum("“On page" in question[-300:] for question, _ in turns)
    assert 0.3 < num_quotes / len(turns) < 0.5


def test_the_text_is_not_changed_between_facts():
    """Without its facts, a conversation's text is a stretch of the source."""
    for conversation in make([STORY])[:5]:
        text = text_of(conversation)
        for _, match in facts_in(text):
            text = text.replace(match.group(), "")
        sentences = re.findall(r"On page \d+ [^.]*\.", text)
        assert len(sentences) > 5
        assert all(sentence in STORY[1] for sentence in sentences)


def test_texts_are_read_as_they_are_needed():
    """Some texts are open and some conversations wait: not all texts are read before the first conversations."""
    read = []

    def texts():
        for number in range(2000):
            read.append(number)
            yield f"text {number}", write_story(60, start=60 * number)

    conversations = make_stream({4000: 1}).make(texts())
    for _ in range(5):
        next(conversations)
    assert 50 < len(read) < 400


def test_a_long_book_does_not_fill_the_beginning():
    book = ("book", write_story(20_000))
    others = [(f"{number}", write_story(60, start=100_000 + 60 * number)) for number in range(400)]
    stream = make_stream({4000: 1}).make([book, *others])
    first = [text_of(next(stream)) for _ in range(60)]
    numbers = [int(re.search(r"On page (\d+)", text)[1]) for text in first]
    assert 5 < sum(number < 20_000 for number in numbers) < 45


def test_a_pass_ends_with_none():
    stream = make_stream({4000: 1})
    both = list(stream.make([STORY, None, STORY, None]))
    assert both.count(None) == 2
    assert both[-1] is None
    first, second = both[: both.index(None)], both[both.index(None) + 1 : -1]
    assert abs(len(first) - len(second)) <= 2
    assert as_data(first) != as_data(second)
    assert (stream.counts.num_texts, stream.counts.num_conversations) == (2, len(first) + len(second))


def test_languages_are_not_mixed():
    texts = [(f"{code} {number}", PARAGRAPHS[code]) for number in range(30) for code in PARAGRAPHS]
    conversations = make(texts)
    assert {each.language for each in conversations} == {each.name for each in read_languages().values()}
    for conversation in conversations:
        marks = {"German": " der ", "French": " les ", "Chinese": "的", "Dutch": " het ", "Italian": " gli "}
        in_text = {name for name, mark in marks.items() if mark in text_of(conversation)}
        assert in_text <= {conversation.language}


def test_texts_in_other_languages_are_counted():
    stream = make_stream({4000: 1})
    texts = [STORY, ("code", UNKNOWN["code"]), ("table", UNKNOWN["table"])]
    assert [each for each in stream.make(texts) if each]
    assert (stream.counts.num_texts, stream.counts.num_unknown) == (3, 2)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([('Line 3 of "a.csv"', UNKNOWN["table"])], 'language of line 3 of "a.csv" is not one of English, German, '),
        ([('"x.txt"', UNKNOWN["Danish"]), None], r'language of "x.txt" is not one of English, .*Chinese\.'),
        ([], "contains no text"),
        ([None], "contains no text"),
    ],
)
def test_data_without_questions_is_refused(texts, message):
    with pytest.raises(CtxextError, match=message) as refused:
        make(texts)
    assert refused.value.hint


def test_endless_texts_in_other_languages_are_refused():
    with pytest.raises(CtxextError, match="is not one of"):
        make((f"{number}", UNKNOWN["short"]) for number in range(10**9))


def test_a_length_without_room_is_refused():
    with pytest.raises(CtxextError, match="No question about the texts fits into 60 tokens") as refused:
        make([STORY], {60: 1})
    assert refused.value.hint == "Use a longer --length."


def test_a_template_that_cannot_be_learned_is_refused():
    with pytest.raises(CtxextError, match="A conversation about the data has no answer"):
        make([STORY], template="{{ messages | length }}" + CHAT)


def test_a_tokenizer_of_words_is_enough(base):
    """Its tokens are all unknown words."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    stream = QuestionStream(RecordEncoder(tokenizer, only_answers=True), {400: 1}, 0)
    sizes = [len(each.document.ids) for each in stream.make([STORY]) if each]
    assert sum(sizes) / len(sizes) > 300
    assert max(sizes) <= 400


def test_a_text_without_ends_of_sentences_is_divided():
    text = " ".join(f"and the word {number} of it is in the list" for number in range(3000))
    conversations = make([("a", text)])
    assert len(conversations) > 20


def test_only_passages_that_occur_once_are_continued():
    """The continuation of a repeated passage would be ambiguous."""
    turns = [turn for each in make([("a", PARAGRAPHS["en"] * 40)]) for turn in turns_of(each)]
    assert len(turns) > 30
    assert not [question for question, _ in turns if "“" in question[-200:]]
