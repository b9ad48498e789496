"""Prompts of five kinds for draft heads of chat models: chat, code, summary, story and arithmetic, drawn from lists.

A held-out prompt is drawn from words, tasks and passages that no training prompt uses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from stories import SEPARATOR, read_stories

KINDS = ("chat", "code", "summary", "story", "arithmetic")
HELD_OUT_EVERY = 5  # every fifth entry of each list below is used by held-out prompts only
PASSAGE_CHARACTERS, LEAST_CHARACTERS, TEXT_CHARACTERS = 500, 200, 1500

TOPICS = """photosynthesis|the water cycle|the French Revolution|black holes|inflation|vaccines|the Roman Empire
|jazz music|renewable energy|the human heart|plate tectonics|democracy|coral reefs|the printing press|gravity
|the immune system|machine learning|the Silk Road|climate change|volcanoes|the stock market|antibiotics
|the Renaissance|solar panels|DNA|the moon landing|impressionist painting|nuclear power|honey bees
|the Industrial Revolution|sleep|chocolate|earthquakes|electric cars|the Great Wall of China|meditation|rainbows
|penguins|the internet|ancient Egypt|supply and demand|tides|whales|the Olympic Games|cheese making|rockets
|the digestive system|cloud computing|rainforests|Shakespeare|batteries|migration of birds|glaciers
|the periodic table|coffee|chess|lightning|vitamins|the Cold War|recycling|sharks|the Amazon river|telescopes|yoga
|bread|dinosaurs|quantum computers|deserts""".replace("\n", "").split("|")
ACTIVITIES = """learning a new language|saving money|running a first marathon|preparing for a job interview
|growing tomatoes|writing a good essay|sleeping better|travelling with small children|learning to play the guitar
|cooking for a large group|working from home|studying for exams|making new friends|reducing stress
|planning a birthday party|buying a used car|training a puppy|giving a speech|packing for a long trip
|eating more vegetables|starting a small business|reading more books|taking better photographs|cleaning the kitchen
|riding a bicycle in winter|moving to a new city|keeping a diary|hiking in the mountains|managing a team
|learning to swim""".replace("\n", "").split("|")
CHAT = (
    "What is {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Give me five tips for {activity}.",
    "Why is {topic} important?",
    "What are the advantages and disadvantages of {activity}?",
    "Tell me three interesting facts about {topic}.",
    "Write a short email to a friend about {activity}.",
    "I need some advice on {activity}. Where should I start?",
    "How does {topic} affect everyday life?",
    "Compare {topic} with {other}.",
    "Write a paragraph about the history of {topic}.",
    "Make a weekly plan for {activity}.",
)
LANGUAGES = ("Python", "JavaScript", "Python", "C", "Java", "Python", "Rust", "Python", "Go", "SQL")
TASKS = """reverses a string|checks whether a number is prime|computes the factorial of n|sorts a list of numbers
|finds the largest element of a list|counts the words in a text|removes duplicates from a list
|computes the n-th Fibonacci number|checks whether a word is a palindrome|merges two sorted lists
|converts Celsius to Fahrenheit|reads a file and prints its lines|computes the average of a list
|finds the common elements of two lists|implements binary search|counts the vowels in a string
|computes the greatest common divisor|implements a stack|flattens a nested list|generates a random password
|parses a date|computes the area of a circle|rotates a list by k positions|validates an email address
|implements bubble sort|computes the sum of the digits of a number|transposes a matrix
|counts how often each character occurs|implements a queue|computes powers without the power operator""".replace(
    "\n", ""
).split("|")
CODE = (
    "Write a function in {language} that {task}.",
    "Write a {language} program that {task}. Explain how it works.",
    "How do I write code that {task} in {language}?",
    "Give me a short {language} example that {task}, with comments.",
)
SUMMARY = (
    "Summarize the following passage in two sentences.\n\n{passage}",
    "Summarize this text:\n\n{passage}",
    "What happens in the following passage?\n\n{passage}",
    "Give a short summary and the main idea.\n\n{passage}",
)
CHARACTERS = """a lonely lighthouse keeper|a curious cat|two brothers|a young inventor|an old sailor|a shy dragon
|a baker|a girl named Mia|a robot|a brave mouse|a retired detective|a wizard's apprentice|a lost astronaut
|a farmer and his horse|a little bear|a princess|a violin player|a teacher|a fox and an owl|a boy named Tom
|a painter|a clumsy knight|a family of ducks|a time traveller|a gardener""".replace("\n", "").split("|")
EVENTS = """finds a mysterious letter|gets lost in a forest|discovers a hidden door|learns to share
|wins a strange contest|saves a village from a flood|makes an unexpected friend|loses something precious
|goes on a journey across the sea|meets a talking tree|solves an old mystery|learns not to give up
|builds a flying machine|hears music at night|must keep a secret|returns home after many years|finds a magic stone
|faces a great storm|helps a stranger|dreams of the stars""".replace("\n", "").split("|")
STORY = (
    "Write a short story about {character} who {event}.",
    "Tell me a bedtime story in which {character} {event}.",
    "Write the beginning of a novel: {character} {event}.",
    "Continue this story:\n\n{opening}",
)
NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ivy",
    "Jack",
    "Laura",
    "Max",
    "Nina",
    "Paul",
)
ITEMS = ("apples", "books", "marbles", "stickers", "coins", "pencils", "cookies", "oranges", "cards", "eggs")
ARITHMETIC = (
    "What is {a} + {b}?",
    "What is {a} - {b}?",
    "Calculate {c} * {d}.",
    "{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?",
    "{name} has {a} {item} and gives {c} of them to a friend. How many are left? Show your work.",
    "A box holds {c} {item}. How many {item} are in {d} boxes? Explain step by step.",
    "Solve the equation {c}x + {d} = {e} for x.",
    "What is {percent}% of {round}?",
    "{name} reads {c} pages a day. How long does a book of {a} pages take? Think step by step.",
    "Count from {d} to {e}.",
)


def read_passages(files: Sequence[Path], separator: str = SEPARATOR) -> list[str]:
    """Return the texts of files; a text without separators, like a novel's, in passages of whole paragraphs."""
    return [passage for text in read_stories(files, separator) for passage in passages(text)]


def passages(text: str) -> Iterator[str]:
    """Yield parts of a text of TEXT_CHARACTERS or, with the last paragraph, a few more."""
    part = ""
    for paragraph in text.split("\n\n"):
        part += paragraph.strip() + "\n\n"
        if len(part) >= TEXT_CHARACTERS:
            yield part.strip()
            part = ""
    if part.strip():
        yield part.strip()


class PromptSource:
    """Draws prompts. `passages` are texts: summaries and openings are drawn from them."""

    def __init__(self, passages: Sequence[str], seed: int, *, held_out: bool) -> None:
        self._random, self._held_out = random.Random(f"{seed}-{held_out}"), held_out
        self._passages = [each for each in passages if len(each) >= LEAST_CHARACTERS] or list(passages)

    def prompt(self, kind: str) -> str:
        """Return the next prompt of one of KINDS."""
        draw, number = self._random, self._random.randint
        if kind == "chat":
            topic, other, activity = self._one(TOPICS), self._one(TOPICS), self._one(ACTIVITIES)
            return draw.choice(CHAT).format(topic=topic, other=other, activity=activity)
        if kind == "code":
            return draw.choice(CODE).format(language=draw.choice(LANGUAGES), task=self._one(TASKS))
        if kind == "summary":
            return draw.choice(SUMMARY).format(passage=self._passage(PASSAGE_CHARACTERS))
        if kind == "story":
            character, event, opening = self._one(CHARACTERS), self._one(EVENTS), self._passage(150)
            return draw.choice(STORY).format(character=character, event=event, opening=opening)
        values = {"a": number(20, 400), "b": number(2, 99), "c": number(2, 20), "d": number(2, 12), "e": number(13, 60)}
        values |= {"percent": number(1, 19) * 5, "round": number(2, 40) * 10}
        return draw.choice(ARITHMETIC).format(name=self._one(NAMES), item=self._one(ITEMS), **values)

    def _one(self, entries: Sequence[str]) -> str:
        mine = [each for place, each in enumerate(entries) if (place % HELD_OUT_EVERY == 0) == self._held_out]
        return self._random.choice(mine or entries)

    def _passage(self, n_characters: int) -> str:
        """Return the whole words of part of a text, from the beginning of a sentence if there is one."""
        text = self._one(self._passages)
        first = self._random.randrange(max(1, len(text) - n_characters))
        found = text.find(". ", first)
        first = found + 2 if 0 <= found < len(text) - n_characters else 0
        return " ".join(text[first : first + n_characters].rsplit(" ", 1)[0].split())
