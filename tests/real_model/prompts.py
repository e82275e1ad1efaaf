"""Twenty prompts for the real model, of the kinds that speculation treats differently."""

from __future__ import annotations

from typing import Any

_HARBOUR = (
    "The harbour master kept a ledger in which every vessel was entered by hand: the hour she tied up, the cargo "
    "she carried, the number of souls aboard and the weather that had followed her in. On the ninth of October a "
    "schooner named Patience arrived without a crew. Her sails were furled, her lamps were trimmed, and on the "
    "galley table lay a loaf of bread that was still warm. The master wrote nothing for a long while. Then he drew "
    "a line under the day, put down his pen, and walked out to the end of the pier to see whether the tide was "
    "coming in or going out."
)
_RECIPE = (
    "Soak the beans overnight in cold water. Drain them, cover with fresh water and simmer for an hour. Meanwhile "
    "chop two onions, a carrot and a stick of celery, and soften them in olive oil with a bay leaf. Add the beans, "
    "a tin of tomatoes and a glass of the cooking water; season with salt, pepper and a pinch of sugar."
)
_CODE = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count=1):
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count=1):
        if self.items.get(name, 0) < count:
            raise ValueError(f"not enough {name}")
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
"""
_LETTER = (
    "Dear Marta, thank you for the seeds, which came through the post in good order. I have sown the beans along the "
    "south wall and the marigolds between the cabbages, as you advised. Father sends his regards."
)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _long(words: int) -> str:
    """Prose without long repeats: sentences that count and describe different things."""
    things = [
        "lamp",
        "river",
        "ladder",
        "orchard",
        "clock",
        "bridge",
        "kettle",
        "violin",
        "anchor",
        "meadow",
        "lantern",
        "barrel",
    ]
    verbs = [
        "crossed",
        "carried",
        "mended",
        "forgot",
        "counted",
        "painted",
        "followed",
        "borrowed",
        "measured",
        "sold",
    ]
    parts = []
    i = 0
    while sum(map(len, map(str.split, parts))) < words:
        a, b, v = things[(i * 7) % 12], things[(i * 5 + 3) % 12], verbs[(i * 3 + i // 10) % 10]
        parts.append(
            f"On day {i + 1} the keeper of the {a} {v} the {b} and wrote {i * i + 17} in the margin."
        )
        i += 1
    return " ".join(parts)


PROMPTS: dict[str, Any] = {
    "copy-harbour": _chat(f"Repeat this text exactly: {_HARBOUR}"),
    "copy-recipe": _chat(f"Copy the following text word for word.\n\n{_RECIPE}"),
    "copy-code": _chat(f"Print this file again without any change:\n```python\n{_CODE}```"),
    "copy-letter": f"{_LETTER}\n\nThe same letter once more:\n\n{_LETTER[:40]}",
    "rewrite-letter": _chat(f"Rewrite this letter, with Marta replaced by Helena: {_LETTER}"),
    "code-fibonacci": _chat(
        "Write a Python function that returns the n-th Fibonacci number, with a docstring."
    ),
    "code-continue": _CODE + "\n    def most_common(self):\n",
    "code-raw": "def quicksort(values):\n    if len(values) <= 1:\n        return values\n",
    "code-explain": _chat(f"Explain step by step what this class does:\n{_CODE}"),
    "chat-capital": _chat("What is the capital of France, and what is it known for?"),
    "chat-story": _chat("Write a short story about a lighthouse keeper who befriends a seagull."),
    "chat-list": _chat("List ten tips for learning to play the guitar."),
    "chat-maths": _chat(
        "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain."
    ),
    "chat-turns": [
        *_chat("Name three primary colours."),
        {"role": "assistant", "content": "Red, yellow and blue."},
        *_chat("Which of them do you get by mixing others?")[:1],
    ],
    "summary": _chat(f"Summarize in two sentences: {_HARBOUR}"),
    "one-token": [504],
    "one-token-newline": [198],
    "two-words": "Once upon",
    "long": _long(1150),
    "long-question": _chat(f"{_long(700)}\n\nWhat did the keeper of the lamp do on day 1?"),
}
