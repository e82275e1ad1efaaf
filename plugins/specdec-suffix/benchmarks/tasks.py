"""Requests as one application makes them, and what a faithful model answers: deterministic texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

Task = tuple[str, str]  # prompt, answer

_NAMES = "Ada Bruno Chiara Dmitri Elena Farid Greta Hugo Ines Jonas Kaito Lena Marek Nadia Omar Petra".split()
_SURNAMES = "Lindqvist Okafor Moreau Tanaka Silva Novak Haddad Jensen Kowalska Ferrari Weber Costa".split()
_CITIES = "Lisbon Oslo Nairobi Quito Hanoi Bergen Gdansk Leeds Porto Turin Izmir Cork".split()
_GOODS = "lamp chair kettle rug mirror desk shelf clock vase stool basket blanket".split()
_WORDS = (
    "river stone quiet market early window under narrow bright harbour winter letter across patient "
    "copper garden slowly remember distant engine paper simple weather people carry almost yellow "
    "forest answer bridge between small ocean turning silver question morning around heavy never "
    "circle travel listen corner field"
).split()


def extract(random: Random) -> Iterator[Task]:
    """One record from a free text into JSON: the values stand in the prompt, the frame in earlier answers."""
    while True:
        name, surname, city = (random.choice(words) for words in (_NAMES, _SURNAMES, _CITIES))
        order, count, goods = random.randrange(10_000, 99_999), random.randrange(1, 20), random.choice(_GOODS)
        price, day, paid = random.randrange(10, 900), random.randrange(1, 29), random.random() < 0.5
        prompt = (
            "Extract the order as JSON.\n\n"
            f"Hello, this is {name} {surname} writing from {city}. On 2024-05-{day:02d} I ordered {count} of "
            f"your {goods}s at {price} euros each, order {order}. I have {'' if paid else 'not yet '}paid."
            "\n\nJSON:"
        )
        record = {
            "order": {"id": order, "date": f"2024-05-{day:02d}", "status": "paid" if paid else "open"},
            "customer": {"first_name": name, "last_name": surname, "city": city, "country": None},
            "lines": [{"item": goods, "quantity": count, "unit_price": price, "currency": "EUR"}],
            "needs_review": not paid,
        }
        yield prompt, json.dumps(record, indent=2) + "\n"


def table(random: Random) -> Iterator[Task]:
    """Rows of a table into JSON objects: the frame repeats within one answer too."""
    while True:
        rows = [
            (random.choice(_NAMES), random.choice(_CITIES), random.randrange(18, 80), random.choice(_GOODS))
            for _ in range(6)
        ]
        lines = "\n".join(f"{name},{city},{age},{goods}" for name, city, age, goods in rows)
        records = [dict(zip(("name", "city", "age", "last_purchase"), row, strict=True)) for row in rows]
        answer = json.dumps(records, indent=2)
        yield f"Turn this table into a JSON array.\n\nname,city,age,purchase\n{lines}\n\nJSON:", answer + "\n"


def agent(random: Random) -> Iterator[Task]:
    """Steps of an agent: fixed phrases around a tool call, few of whose arguments are in the prompt."""
    phrases = (
        "I will first look at the file to understand how it is structured before I change anything.",
        "The test still fails, so I will search for the place where this value is computed.",
        "Now I will run the tests again to check that the change works as it should.",
    )
    tools = ("open_file", "search_in_repository", "run_tests")
    while True:
        kind = random.randrange(3)
        module = f"{random.choice(_GOODS)}_{random.choice(_WORDS)}.py"
        line = random.randrange(1, 900)
        seen = f"{random.choice(_WORDS)} {random.choice(_WORDS)} in src/{module}, line {line}"
        prompt = f"Observation: {seen}.\nNext step:"
        call = {
            "tool": tools[kind],
            "arguments": {"path": f"src/{module}", "line": line, "context": 20, "quiet": True},
        }
        yield prompt, f"Thought: {phrases[kind]}\nAction:\n```json\n{json.dumps(call, indent=2)}\n```\n"


def edit(random: Random) -> Iterator[Task]:
    """A function given back with one name changed: almost all of the answer stands in the prompt."""
    while True:
        names = random.sample(_WORDS, 5)
        code = (
            f"def {names[0]}({names[1]}, {names[2]}=None):\n"
            f'    """Return the {names[3]} of the {names[4]}."""\n'
            f"    if {names[2]} is None:\n        {names[2]} = {random.randrange(100)}\n"
            f"    total = 0\n    for entry in {names[1]}:\n        if entry.{names[3]} > {names[2]}:\n"
            f"            total += entry.{names[4]} * {random.randrange(2, 50)}\n    return total\n"
        )
        old, new = names[1], random.choice(_GOODS)
        yield f"Rename {old} to {new}.\n\n```python\n{code}```\n", f"```python\n{code.replace(old, new)}```\n"


def prose(random: Random) -> Iterator[Task]:
    """The control: words at random, so that there is nothing to gain."""
    while True:
        words = [random.choice(_WORDS) for _ in range(80)]
        yield f"Write about {words[0]} and {words[1]}.\n", " ".join(words[2:]) + ".\n"


WORKLOADS: dict[str, Callable[[Random], Iterator[Task]]] = {
    "extract": extract,
    "table": table,
    "agent": agent,
    "edit": edit,
    "prose": prose,
}
REPEATED = ("extract", "table", "agent", "edit")
"""All but the control."""


def tasks(name: str, count: int) -> list[Task]:
    """Give the first `count` tasks of a workload, always the same."""
    made = WORKLOADS[name](Random(f"specdec {name}"))
    return [next(made) for _ in range(count)]
