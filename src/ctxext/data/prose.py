"""Endless English-like prose from a small grammar: the haystack that ships with the package.

Every sentence is drawn from a pattern and word lists written here, so the text is free to use, needs no download,
is the same for the same seed, and contains no digits: a number in a haystack is always a needle.
"""

import random
import re
from collections.abc import Iterator


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


FIRST_NAMES = _words("""
    Mara Tomas Ines Oskar Lena Hugo Nadia Felix Clara Jonas Petra Simon Alma Victor Rosa Edgar Vera Anton Ruth
    Martin Ada Bruno Celia Dario Elsa Frank Greta Henry Iris Jacob Karen Leo Nora Oliver Paula Robert Sara Thomas
    Ursula Walter
""")
LAST_NAMES = _words("""
    Bell Carter Dunn Ellis Fisher Grant Hale Irving Keller Lane Marsh North Parker Quinn Reed Stone Turner Vance
    Ward Young Baker Cole Drake Frost Glover Hunt Jensen Knight Lowell Mason
""")
PLACES = _words("""
    Ashford Brindle Carrow Dunmore Elmstead Fairwick Glenholm Harlow Ivybridge Kingsley Langdon Millbrook Norwood
    Oakham Penrith Redcliff Selby Thornton Upton Westbury Aldham Brackley Corby Denton Eastleigh Farnham Grafton
    Hadley Kelso Linton
""")
ADJECTIVES = _words("""
    amber silver copper golden crimson purple scarlet ivory wooden marble broken hidden narrow silent ancient little
    heavy gentle bright dusty frozen hollow painted polished rusty sacred striped velvet wild woven
""")
OBJECTS = _words("""
    lantern compass ladder mirror basket anchor bottle bridge candle carpet chest clock cradle drum feather fiddle
    flag garden gate glove goblet hammer harp helmet kettle key knife locket map mask medal necklace needle oven
    paddle parcel pillow pipe plough quilt ribbon ring saddle shield spoon statue sword table tower trumpet tunnel
    umbrella vase vault violin wagon wallet wheel whistle window
""")
TRADES = _words("""
    baker miller farmer doctor teacher painter tailor sailor printer carpenter gardener clerk captain weaver potter
    builder fisherman librarian musician shepherd
""")
GOODS = _words("""
    apples barley bread butter cheese cloth coal corn eggs fish flour honey iron leather milk oil onions paper pears
    rope salt silk soap sugar tea timber wheat wine wool
""")
SITES = _words("""
    bakery barn chapel church courtyard farm forest harbour hill hospital inn kitchen library market meadow mill
    museum orchard park river road school shop square station stable street theatre valley village workshop
""")
TIMES = _phrases("""
    at dawn | before noon | in the afternoon | after supper | late at night | in early spring | all summer | every
    autumn | through the winter | on market day | for many years | once a week | from time to time | without any
    hurry | last week | on a Sunday
""")
WEATHER = _words("rain snow fog wind thunder hail frost sunshine mist heat")
MOODS = _words("tired cheerful quiet proud worried calm busy patient curious lonely hungry grateful")
PAST_ACTIONS = _phrases("""
    walked to | waited near | worked in | rested by | returned from | looked around | painted | cleaned | repaired |
    crossed | remembered | left | passed | visited
""")
TRADED = _words("sold bought carried ordered weighed counted packed stored wanted")

PATTERNS = (
    "{first} {action} the {site} {time}.",
    "{first} {last} {traded} {goods} and {goods} in {place}.",
    "The {trade} of {place} {traded} {goods} {time}.",
    "There was {weather} over {place} {time}.",
    "After the {weather}, the {site} was {adjective} and the {trade} was {mood}.",
    "{first} and {first} {action} the {site}, because the {weather} had come.",
    "Nobody in {place} knew why the {trade} {action} the {site}.",
    "The road from {place} to {place} goes past a {adjective} {site}.",
    "When the {weather} stopped, {first} {action} the {site} with a {object}.",
    "The {adjective} {object} belonged to the {trade}, who was always {mood}.",
    "In {place} the price of {goods} rose {time}.",
    "{first} told the {trade} about the {site}, and the {trade} was {mood}.",
    "People say that the {site} in {place} is older than the {site}.",
    "It was a {mood} town: the {trade} and the {trade} met {time}.",
    "If there is {weather} tomorrow, {first} will stay near the {site} in {place}.",
    "She had never seen such {goods} as {time} in {place}.",
    "He put the {object} beside the {goods} and felt {mood}.",
    "Between the {site} and the {site} stands a {adjective} {object}.",
    "They wrote a letter to {first} {last}, the {trade} of {place}.",
    "The {weather} made everyone {mood}, but {first} {action} the {site}.",
)
WORDS = {
    "first": FIRST_NAMES,
    "last": LAST_NAMES,
    "place": PLACES,
    "adjective": ADJECTIVES,
    "object": OBJECTS,
    "trade": TRADES,
    "goods": GOODS,
    "site": SITES,
    "time": TIMES,
    "weather": WEATHER,
    "mood": MOODS,
    "action": PAST_ACTIONS,
    "traded": TRADED,
}
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_SLOT = re.compile(r"\{(\w+)\}")


def sentence(rng: random.Random) -> str:
    """One sentence, without surrounding spaces."""
    pattern = rng.choice(PATTERNS)
    filled = _SLOT.sub(lambda slot: rng.choice(WORDS[slot[1]]), pattern)
    return _ARTICLE.sub(r"\1n ", filled)


def sentences(rng: random.Random) -> Iterator[str]:
    """Sentences without end, each without surrounding spaces; the same for the same state of `rng`."""
    while True:
        yield sentence(rng)


def paragraph(rng: random.Random, num_sentences: int) -> str:
    """Some sentences joined by spaces."""
    return " ".join(sentence(rng) for _ in range(num_sentences))


def object_name(rng: random.Random) -> str:
    """Two words that name a thing a fact can be told about, such as "amber lantern"."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}"


def object_names(rng: random.Random, count: int) -> list[str]:
    """Names of different things; no noun comes twice while there are nouns left.

    Raises:
        ValueError: if there are not that many different names.
    """
    if count <= len(OBJECTS):
        return [f"{rng.choice(ADJECTIVES)} {noun}" for noun in rng.sample(OBJECTS, count)]
    return rng.sample([f"{adjective} {noun}" for adjective in ADJECTIVES for noun in OBJECTS], count)


def person_name(rng: random.Random) -> str:
    """A first and a last name."""
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def random_number(rng: random.Random, num_digits: int) -> str:
    """A number of that many digits that does not begin with zero."""
    return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
