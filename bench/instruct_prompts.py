"""Questions as people put them to a small instruct model: `python -m bench.instruct_prompts --out FILE`.

What the demonstration's draft is distilled on. They are put together from subjects and ways of asking, as JSON lines of
conversations, some of them of two turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

_SUBJECTS = """
the water cycle; photosynthesis; gravity; the moon's phases; volcanoes; earthquakes; rainbows; thunderstorms; the
seasons; tides; black holes; the solar system; vaccines; antibiotics; the human heart; sleep; memory; dreams;
nutrition; vitamins; bees; whales; elephants; octopuses; migrating birds; ants; coral reefs; rain forests; deserts;
glaciers; rivers; maps; compasses; time zones; the printing press; the steam engine; bicycles; airplanes; bridges;
lighthouses; clocks; telescopes; microscopes; batteries; magnets; electricity; solar panels; wind turbines; the
internet; email; passwords; encryption; databases; search engines; compilers; recursion; binary search; sorting
algorithms; linked lists; hash tables; unit tests; version control; open source; machine learning; neural networks;
probability; prime numbers; fractions; the Pythagorean theorem; statistics; budgeting; inflation; taxes; insurance;
markets; trade; democracy; constitutions; courts; elections; the Roman Empire; ancient Egypt; the Renaissance; the
Silk Road; the French Revolution; the industrial revolution; jazz; symphonies; the violin; painting; photography;
poetry; novels; theatre; cinema; chess; football; swimming; running; yoga; hiking; gardening; baking bread; coffee;
tea; chocolate; cheese; soup; spices; recipes; public speaking; job interviews; teamwork; leadership; friendship;
patience; honesty; curiosity; learning a language; writing letters
"""
_PLACES = """
France; Germany; Italy; Spain; Portugal; Norway; Sweden; Finland; Poland; Greece; Turkey; Egypt; Kenya; Nigeria;
Ghana; Morocco; India; China; Japan; Korea; Vietnam; Thailand; Indonesia; Australia; New Zealand; Canada; Mexico;
Brazil; Argentina; Chile; Peru; Colombia; Austria; Hungary; Ireland; Iceland; Denmark; Belgium; Switzerland; Cuba
"""
_OF_A_SUBJECT = (
    "What is {}?",
    "Explain {} to a child.",
    "Explain {} in two sentences.",
    "Tell me three facts about {}.",
    "Why does {} matter?",
    "Write a short paragraph about {}.",
    "Give me five words that have to do with {}.",
    "What should a beginner know about {}?",
    "Write a four-line poem about {}.",
    "What are common misconceptions about {}?",
    "How would you teach {}?",
    "Suggest a title for an article about {}.",
    "What questions could I ask an expert on {}?",
    "Summarise the history of {}.",
    "Compare {} with something from everyday life.",
)
_OF_A_PLACE = (
    "What is the capital of {}?",
    "Which languages are spoken in {}?",
    "What is {} known for?",
    "Name two cities in {}.",
    "What should I eat in {}?",
    "Plan a day in {} for me.",
    "What is the climate of {} like?",
)
_OF_CODE = (
    "Write a Python function that {}.",
    "Write a short Python program that {}.",
    "Explain how a function works that {}.",
    "Write a test for a function that {}.",
)
_TASKS = """
reverses a string; counts the words of a text; finds the largest number in a list; removes duplicates from a list;
sorts a list of names; checks whether a number is prime; computes a factorial; reads a file line by line; merges two
dictionaries; converts Celsius to Fahrenheit; finds the most common letter; checks for a palindrome; sums the even
numbers; splits a list into chunks; formats a date; parses JSON; flattens nested lists; rounds to two decimals;
validates an email address; draws a triangle of stars
"""
_SMALL_TALK = (
    "Hello!",
    "Hi, who are you?",
    "How are you today?",
    "What can you do?",
    "Tell me a joke.",
    "Tell me a story about a dragon.",
    "I am bored. What could I do?",
    "Give me a fun fact.",
    "Wish me luck for my exam.",
    "What is your favourite colour?",
)
_FOLLOW_UPS = (
    "Can you say that more simply?",
    "Give an example.",
    "Why?",
    "Make it shorter.",
    "Tell me more.",
    "Thanks! And what else?",
)


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Returns `count` different conversations, whose last turn is the user's."""
    rng = random.Random(seed)
    subjects, places, tasks = (
        [one.strip() for one in text.replace("\n", " ").split(";")] for text in (_SUBJECTS, _PLACES, _TASKS)
    )
    found: dict[str, list[dict[str, str]]] = {}
    while len(found) < count:
        kind = rng.random()
        if kind < 0.66:
            question = rng.choice(_OF_A_SUBJECT).format(rng.choice(subjects))
        elif kind < 0.80:
            question = rng.choice(_OF_A_PLACE).format(rng.choice(places))
        elif kind < 0.84:
            question = f"What is {rng.randint(2, 99)} {rng.choice(('plus', 'minus', 'times'))} {rng.randint(2, 99)}?"
        elif kind < 0.98:
            question = rng.choice(_OF_CODE).format(rng.choice(tasks))
        else:
            question = rng.choice(_SMALL_TALK)
        turns = [{"role": "user", "content": question}]
        if rng.random() < 0.1:
            subject = rng.choice(subjects)
            turns = [
                {"role": "user", "content": f"What do you know about {subject}?"},
                {
                    "role": "assistant",
                    "content": f"There is a lot to say about {subject}. What would you like to know?",
                },
                {"role": "user", "content": rng.choice(_FOLLOW_UPS)},
            ]
        found[json.dumps(turns)] = turns
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.instruct_prompts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    lines = (json.dumps({"messages": turns}) for turns in conversations(arguments.count, arguments.seed))
    arguments.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
