"""Toy constraints, and plain constrained decoding to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import next_logits, tiny_llama, warped
from torch import Tensor

from specdec_core import Constraint, SamplingParams, SpecDecoder
from specdec_core.contract.rng import KeyedRng, Purpose

VOCAB = 97
EOS = 60
SEMICOLON = 20


# --- toy constraints ------------------------------------------------------------------------------


class Rule:
    """A constraint from two functions of the text: which tokens may follow, and whether it may end there."""

    def __init__(
        self, name: str, follow: Callable[[list[int]], set[int]], ends: Callable[[list[int]], bool]
    ) -> None:
        self.name, self.follow, self.ends = name, follow, ends

    def __repr__(self) -> str:
        return self.name

    def matcher(self) -> RuleMatcher:
        return RuleMatcher(self)

    def takes(self, text: Sequence[int]) -> bool:
        """Whether a whole text is valid and may end."""
        return all(t in self.follow(list(text[:i])) for i, t in enumerate(text)) and self.ends(list(text))


class RuleMatcher:
    """Keeps what it consumed."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.text = rule, list[int]()

    def consume(self, tokens: list[int]) -> int:
        for i, token in enumerate(tokens):
            if token not in self.rule.follow(self.text):
                return i
            self.text.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[-count:]

    def allowed(self) -> Tensor:
        mask = torch.zeros(VOCAB - 5, dtype=torch.bool)  # shorter than the target's vocabulary
        mask[sorted(self.rule.follow(self.text))] = True
        return mask

    def complete(self) -> bool:
        return self.rule.ends(self.text)

    def forced(self) -> list[int]:
        return []


def digits(most: int = 9) -> Rule:
    """One to `most` digits (tokens 10 to 19), then a semicolon."""

    def follow(text: list[int]) -> set[int]:
        if text and text[-1] == SEMICOLON:
            return set()
        more = set(range(10, 20)) if len(text) < most else set[int]()
        return more | ({SEMICOLON} if text else set[int]())

    return Rule(f"digits({most})", follow, lambda text: text[-1:] == [SEMICOLON])


def exactly(*text: int) -> Rule:
    """This text alone."""
    return Rule(
        "exactly", lambda said: {*text[len(said) : len(said) + 1]}, lambda said: len(said) == len(text)
    )


def brackets(deepest: int = 3) -> Rule:
    """Nested brackets of two kinds, 1 2 and 3 4; any number of them."""

    def opened(text: list[int]) -> list[int]:
        stack: list[int] = []
        for token in text:
            if token in (1, 3):
                stack.append(token)
            else:
                stack.pop()
        return stack

    def follow(text: list[int]) -> set[int]:
        stack = opened(text)
        return ({1, 3} if len(stack) < deepest else set[int]()) | ({stack[-1] + 1} if stack else set[int]())

    return Rule("brackets", follow, lambda text: bool(text) and not opened(text))


# --- the reference --------------------------------------------------------------------------------


def reference(prompt: Sequence[int], params: SamplingParams, eos: int | None = EOS) -> list[int]:
    """Constrained decoding without speculation: a fresh matcher and a plain forward for every token."""
    said: list[int] = []
    while len(said) < params.max_new_tokens:
        scores = next_logits(tiny_llama(), [*prompt, *said])
        if params.constraint is not None:
            matcher = params.constraint.matcher()
            assert matcher.consume(list(said)) == len(said)
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[: VOCAB - 5] = matcher.allowed()
            if eos is not None:
                mask[eos] = matcher.complete()
            if not mask.any():
                break
            scores = scores.masked_fill(~mask, -torch.inf)
        if params.greedy:
            said.append(int(scores.argmax()))
        else:
            assert params.seed is not None
            rng = KeyedRng([params.seed], [len(prompt) + len(said)], Purpose.VERIFY, "", scores.device)
            logits = warped(scores[None], params).log_softmax(dim=-1)
            said.append(int(rng.target_draw(logits, 0)))
        if said[-1] == eos:
            break
    return said


def asked(
    constraint: Constraint | None, eos: int | None = EOS, n: int = 24, **options: Any
) -> SamplingParams:
    ends: dict[str, Any] = {"ignore_eos": True} if eos is None else {"eos_token_id": eos}
    return SamplingParams(max_new_tokens=n, constraint=constraint, **ends, **options)


def ahead_of(texts: Sequence[Sequence[int]]) -> Callable[[list[int], int], list[int]]:
    def ahead(tokens: list[int], k: int) -> list[int]:
        found = (list(text) for text in texts if list(text[: len(tokens)]) == tokens)
        return next((text[len(tokens) : len(tokens) + k] for text in found), [])

    return ahead


def decoder_for(model: Any, drafter: Any, **options: Any) -> SpecDecoder:
    """A decoder whose drafter must not fail; one that follows a script drafts to its own depth."""
    fixed = {} if isinstance(drafter, str) else {"draft_tokens": None}
    return SpecDecoder(model, drafter=drafter, **{"strict": True, **fixed, **options})


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
