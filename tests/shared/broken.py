"""Drafters that break one contract each, as texts of plugins."""

from __future__ import annotations

PREAMBLE = '''
import random
import warnings
import torch
from specdec_core import *

LAW = {law}
TABLE = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).mul_(1.5)


class Chance:
    """Draws a chain from a fixed table, one token after another; right as it is."""

    name = "{name}"
    Config = RowDrafterConfig
    depth = 3

    def __init__(self, config):
        self.config = config
        self.capabilities = Capabilities(laws=frozenset({{LAW}}), max_depth=self.depth)

    def bind(self, target):
        self.vocab = target.vocab_size

    def admit(self, rows): ...
    def observe(self, outcome): ...
    def release(self, rows): ...

    def q(self, last):
        return TABLE[last % 512].repeat(1, -(-self.vocab // 512))[:, : self.vocab].softmax(dim=-1)

    def draw(self, context, q, node):
        return context.rng.categorical(q, node, 0)

    def propose(self, context, budget):
        last = context.tokens.gather(1, context.lengths[:, None] - 1)[:, 0]
        limits = torch.tensor(budget.depth)
        tokens, probs = [], []
        for node in range(min(self.depth, max(budget.depth))):
            q = self.q(last)
            last = self.draw(context, q, node)
            tokens.append(last)
            probs.append(q)
        return self.made(limits, torch.stack(tokens, 1), torch.stack(probs, 1))

    def made(self, limits, tokens, probs):
        place = torch.arange(tokens.shape[1])
        parents = torch.where(place < limits[:, None], place - 1, -2)
        return Draft.of(tokens, parents, LAW, probs=probs)


class Fixed(RowDrafter):
    """Says what the table has after the last two tokens; right as it is."""

    name = "{name}"

    def bind(self, target):
        self.vocab = target.vocab_size

    def after(self, tokens):
        last, before = (TABLE[token % 512, : self.vocab] for token in (tokens[-1], tokens[-2:][0]))
        return int((last + before).argmax())

    def chain(self, tokens, budget):
        text = list(tokens)
        for _ in range(min(budget, 4)):
            text.append(self.after(text))
        return text[len(tokens):]

    def propose_row(self, tokens, budget):
        return self.chain(tokens, budget)

{body}

@hookimpl
def specdec_register_drafters(register):
    register(Broken)
'''

WRONG_Q = """
class Broken(Chance):
    def propose(self, context, budget):
        draft = super().propose(context, budget)
        flat = draft.probs.sqrt()
        return self.made(torch.tensor(budget.depth), draft.tokens, flat / flat.sum(-1, keepdim=True))
"""
WRONG_Q_FROM_ELSEWHERE = """
class Broken(Chance):
    def draw(self, context, q, node):
        sharp = q.pow(2)
        return torch.multinomial(sharp, 1)[:, 0]
"""
STALE = """
class Broken(Fixed):
    def __init__(self, config):
        super().__init__(config)
        self.cache = {}

    def admit(self, rows):
        for row, prompt in zip(rows.ids, rows.prompts):
            self.cache[row] = list(prompt)

    def propose_for(self, row, tokens, budget):
        chain = self.chain(self.cache[row], budget)
        self.cache[row] += chain
        return chain

    def observe(self, outcome):
        for row, tokens in zip(outcome.rows, outcome.tokens):
            self.cache[row] += tokens[-1:]

    def release(self, rows):
        for row in rows:
            self.cache.pop(row, None)
"""
STALE_MODEL = """
class Broken(Fixed):
    def bind(self, target):
        from specdec_core.testing.models import tiny_model
        self.model = tiny_model("llama", vocab=target.vocab_size, seed=5)
        self.caches = {}

    def admit(self, rows):
        from transformers import DynamicCache
        for row in rows.ids:
            self.caches[row] = DynamicCache()

    @torch.no_grad()
    def propose_for(self, row, tokens, budget):
        cache, chain = self.caches[row], []
        new = tokens[cache.get_seq_length():] or tokens[-1:]  # never cropped
        while len(chain) < min(budget, 4):
            with warnings.catch_warnings(action="ignore"):  # the argument has another name in newer releases
                logits = self.model(torch.tensor([new]), past_key_values=cache).logits
            new = [int(logits[0, -1].argmax())]
            chain += new
        return chain

    def release(self, rows):
        for row in rows:
            self.caches.pop(row, None)
"""
SHARED = """
class Broken(Fixed):
    after_pair = {}  # on the class

    def admit(self, rows):
        for prompt in rows.prompts:
            self.after_pair.update(zip(prompt, prompt[1:]))

    def after(self, tokens):
        return self.after_pair.get(tokens[-1], super().after(tokens))
"""
SHARED_INSTANCE = """
class Broken(Fixed):
    said = 0

    def observe(self, outcome):
        self.said += sum(map(len, outcome.tokens))

    def after(self, tokens):
        return (super().after(tokens) + self.said) % self.vocab
"""
OVER_BUDGET = """
class Broken(Fixed):
    def chain(self, tokens, budget):
        return super().chain(tokens, 4)
"""
OVER_BUDGET_OF_NODES = """
class Broken(Fixed):
    def chain(self, tokens, budget):
        return super().chain(tokens, budget + 1)
"""
DRAWN_AS_FIXED = """
class Broken(Chance):
    def made(self, limits, tokens, probs):
        from dataclasses import replace
        return replace(super().made(limits, tokens, probs), probs=None)
"""
FIXED_AS_DRAWN = """
class Broken(Chance):
    def draw(self, context, q, node):
        return q.argmax(-1)
"""
UNDECLARED = """
class Broken(Chance):
    def __init__(self, config):
        super().__init__(config)
        laws = frozenset({DraftLaw.ONE_HOT, DraftLaw.WITHOUT_REPLACEMENT})
        self.capabilities = Capabilities(laws=laws, max_depth=self.depth)
"""
GLOBAL_GENERATOR = """
class Broken(Chance):
    def draw(self, context, q, node):
        return torch.multinomial(q, 1)[:, 0]
"""
DROPPED = """
class Broken(Chance):
    def made(self, limits, tokens, probs):
        sure = probs.gather(2, tokens[:, :, None])[:, :, 0] > 0.02
        kept = sure.long().cumprod(1).sum(1)
        return super().made(torch.minimum(limits, kept), tokens, probs)
"""
KEY_TWICE = """
class Broken(Chance):
    def draw(self, context, q, node):
        return context.rng.categorical(q, 0, 0)
"""
INTS = """
class Broken(Chance):
    def made(self, limits, tokens, probs):
        return super().made(limits, tokens.int(), probs)
"""
RAISES = """
class Broken(Fixed):
    def chain(self, tokens, budget):
        if len(tokens) > 12:
            raise RuntimeError("too long for me")
        return super().chain(tokens, budget)
"""
LEAKS = """
class Broken(Fixed):
    def __init__(self, config):
        super().__init__(config)
        self.prompts = {}

    def admit(self, rows):
        self.prompts.update(zip(rows.ids, rows.prompts))
"""
NEIGHBOUR = """
class Broken(Fixed):
    def propose(self, context, budget):
        self.first = context.row_tokens(0)[-1]
        return super().propose(context, budget)

    def after(self, tokens):
        return (super().after(tokens) + self.first) % self.vocab
"""
RIGHT = """
class Broken(Chance): ...
"""

# text, its law, the contract that it breaks
BROKEN: dict[str, tuple[str, str, str]] = {
    "wrong_q": (WRONG_Q, "DraftLaw.SAMPLED", "law"),
    "wrong_q_from_elsewhere": (WRONG_Q_FROM_ELSEWHERE, "DraftLaw.SAMPLED", "law"),
    "stale": (STALE, "DraftLaw.ONE_HOT", "rollback"),
    "stale_model": (STALE_MODEL, "DraftLaw.ONE_HOT", "rollback"),
    "shared": (SHARED, "DraftLaw.ONE_HOT", "stateless"),
    "shared_instance": (SHARED_INSTANCE, "DraftLaw.ONE_HOT", "stateless"),
    "over_budget": (OVER_BUDGET, "DraftLaw.ONE_HOT", "budget"),
    "over_budget_by_one": (OVER_BUDGET_OF_NODES, "DraftLaw.ONE_HOT", "budget"),
    "drawn_as_fixed": (DRAWN_AS_FIXED, "DraftLaw.ONE_HOT", "law"),
    "fixed_as_drawn": (FIXED_AS_DRAWN, "DraftLaw.SAMPLED", "law"),
    "undeclared": (UNDECLARED, "DraftLaw.SAMPLED", "law"),
    "key_twice": (KEY_TWICE, "DraftLaw.SAMPLED", "law"),
    "global_generator": (GLOBAL_GENERATOR, "DraftLaw.SAMPLED", "randomness"),
    "dropped": (DROPPED, "DraftLaw.SAMPLED", "draws"),
    "ints": (INTS, "DraftLaw.SAMPLED", "shape"),
    "raises": (RAISES, "DraftLaw.ONE_HOT", "works"),
    "neighbour": (NEIGHBOUR, "DraftLaw.ONE_HOT", "rows"),
    "leaks": (LEAKS, "DraftLaw.ONE_HOT", "memory"),
}


def text_of(name: str, body: str, law: str) -> str:
    """The text of a plugin that registers one drafter."""
    return PREAMBLE.format(name=name, law=law, body=body)
