"""`generate` says what a decoder says that knows no speculation, whatever is asked for and whatever drafts.

Greedy with every verifier, sampled with `match`. The examples of the quick test are always the same; the
slow one (`pytest -m slow tests/testing/test_reference.py`) looks at many others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from reference import Said, reference
from support import ScriptedDrafter, following, needs_options, plugins, registered_drafters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_core import (
    HOLE,
    ROOT,
    Capture,
    Drafter,
    GenerationResult,
    IncompatiblePair,
    SamplingParams,
    SpecdecError,
    SpecDecoder,
)
from specdec_core.contract.rng import sample_seed
from specdec_core.plugins.choice import build_drafter
from specdec_core.testing.models import tiny_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig

CONTEXT = 48
# Byte-level tokens: letters that are told apart by few others, so that stops are met; halves of characters,
# alone and behind a letter; one that holds several stops at once. The last is special, and prints nothing.
TEXTS = ["a", "b", "c", " ", "\n", "ab", "bc", "abc", " a", "c\n", "ba", "cab", "aa", "-"]
BYTES = [b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"a\xc3", b"\xa9b", b"\xc3\xa9", b"\xac\xe2"]
END = len(TEXTS) + len(BYTES)
VOCAB = END + 1
WORDS = [*"a b c ab bc abc abca aab b\nc ca bb - é € éb a€".split(" "), " ", " a", "c \n"]


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of these tokens; prompts are given as ids."""
    spelling = dict(zip(range(256), byte_letters(), strict=True))
    tokens = ["".join(spelling[byte] for byte in raw) for raw in (*(t.encode() for t in TEXTS), *BYTES)]
    whole = Tokenizer(models.WordLevel(vocab={token: i for i, token in enumerate(tokens)}, unk_token="a"))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte if byte in plain else 256 + others.index(byte)) for byte in range(256)]


def target() -> Any:
    return tiny_model("llama", vocab=VOCAB, context=CONTEXT)


@functools.cache
def draft_model() -> Any:
    """The target with some noise on its weights: it is right now and then."""
    model = tiny_model("llama", vocab=VOCAB, context=CONTEXT, fresh=True)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.06 * torch.randn(weight.shape, generator=noise)
    return model


# --- what a case is made of -----------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A prompt and its params."""

    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def eos(self) -> set[int]:
        ends = self.params.eos_token_id
        if self.params.ignore_eos:
            return set()
        return {END} if ends is None else {ends} if isinstance(ends, int) else set(ends)


@dataclass(frozen=True)
class Settings:
    """How it is generated."""

    drafter: str
    verifier: str
    draft_tokens: int | Literal["auto"] | None
    max_batch: int
    prefill_chunk: int
    reuse_prefixes: bool
    fixed_shapes: bool
    random: int


KNOWN = {
    "early_exit": [
        "early_exit:layer=1",
        "early_exit:layer=1,draft=sampled",
        "early_exit:layer=1,draft=coupled",
        "early_exit:layer=1,min_confidence=0.2",
        "prompt_lookup,early_exit:layer=1,num_tokens=2",
    ],
    "prompt_lookup": ["prompt_lookup", "prompt_lookup:max_ngram=1,num_tokens=3"],
    "small_model": [f"small_model:draft={draft}" for draft in ("greedy", "sampled", "coupled")],
    "tree_top2": [
        "tree_top2:layer=1",
        "tree_top2:layer=1,width=3,depth=2",
        "tree_top2:layer=1,children=sampled,depth=2",
    ],
}


def drafters() -> list[str]:
    """Every registered drafter that can serve this target, with options that make a difference."""
    found = ["scripted chains", "scripted trees"]
    for name in registered_drafters():
        found += KNOWN.get(name, [] if needs_options(name) or not fits(name) else [name])
    return found


def fits(name: str) -> bool:
    """Whether a drafter takes the target without options."""
    try:
        SpecDecoder(target(), tokenizer(), drafter=name)
    except SpecdecError:
        return False
    return True


def lower_a_third(input_ids: Any, scores: Any) -> Any:
    """A user's processor: a function of the ids alone."""
    third = torch.arange(scores.shape[-1]) % 3 == input_ids[:, -1:] % 3
    return torch.where(third, scores - 2.0, scores)


TOKEN = st.integers(0, VOCAB - 1)
WORD = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)
OPTIONS: dict[str, Any] = {
    "min_new_tokens": st.integers(1, 8),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "presence_penalty": st.sampled_from([-0.5, 0.7]),
    "frequency_penalty": st.sampled_from([-0.2, 0.4]),
    "no_repeat_ngram_size": st.integers(2, 3),
    "bad_words_ids": st.lists(WORD, min_size=1, max_size=3).map(tuple),
    "logit_bias": st.dictionaries(TOKEN, st.sampled_from([-4.0, 1.5, 4.0]), min_size=1, max_size=4),
    "logits_processors": st.just((lower_a_third,)),
    "eos_token_id": TOKEN | st.lists(TOKEN, max_size=3).map(tuple),
    "ignore_eos": st.just(True),
    "stop": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(tuple),
    "include_stop": st.just(True),
    "n": st.integers(2, 3),
    "logprobs": st.integers(0, 3),
    "seed": st.integers(-(2**64), 2**65),
}
SAMPLING: dict[str, Any] = {
    "temperature": st.sampled_from([0.2, 1.0, 1.7]),
    "top_k": st.integers(1, 6),
    "top_p": st.sampled_from([0.3, 0.8]),
    "min_p": st.sampled_from([0.1, 0.5]),
}
PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.sampled_from([0, 1, 2, 5, 12, 24])}, optional={**OPTIONS, **SAMPLING}
).map(lambda options: SamplingParams(**options))
# Beginnings in common are fed once; the last lengths fill the context.
PROMPT = st.builds(
    lambda length, seed: tuple(Random(seed).choices(range(VOCAB), k=length)),
    st.sampled_from([3, 4, 9, 20, 30, 47, 48]),
    st.integers(0, 2),
)
ROWS = st.lists(st.builds(Row, PROMPT, PARAMS), min_size=1, max_size=3)
SETTINGS = st.builds(
    Settings,
    drafter=st.sampled_from(drafters()),
    verifier=st.sampled_from(["auto", *sorted(entry.name for entry in plugins().verifiers())]),
    draft_tokens=st.just("auto") | st.none() | st.integers(0, 8),
    max_batch=st.integers(1, 3),
    prefill_chunk=st.sampled_from([512, 2, 3, 16]),
    reuse_prefixes=st.booleans(),
    fixed_shapes=st.booleans(),
    random=st.integers(0, 5),
)


# --- the comparison -------------------------------------------------------------------------------


def scripted(how: Settings, texts: Sequence[Sequence[int]]) -> ScriptedDrafter:
    """Draft what is going to be said, with mistakes; trees have holes, and wrong siblings anywhere."""
    random, ahead = Random(how.random), following(*texts)
    trees = how.drafter == "scripted trees"

    def script(ask: Any) -> list[tuple[int, int]]:
        right, nodes, depths = ahead(ask.tokens, 8), list[tuple[int, int]](), list[int]()
        size = random.randrange(min(9, ask.nodes + 1) if trees else ask.depth + 1)
        for node in range(size if ask.depth else 0):
            parent = random.choice([ROOT, *range(node)]) if trees else node - 1
            depth = 1 if parent == ROOT else depths[parent] + 1
            full = [above for _, above in nodes].count(parent) == 3
            if depth > ask.depth or full or (parent >= 0 and depths[parent] == 0):
                parent, depth = HOLE, 0
            known = 0 < depth <= len(right) and random.random() < 0.8
            nodes.append((right[depth - 1] if known else random.randrange(VOCAB), parent))
            depths.append(depth)
        return nodes

    return ScriptedDrafter(script, depth=8, nodes=8, trees=trees)


def built(how: Settings, texts: Sequence[Sequence[int]]) -> Drafter:
    if how.drafter.startswith("scripted"):
        return scripted(how, texts)
    if how.drafter.startswith("small_model:draft="):
        draft: Any = how.drafter.partition("=")[2]
        return SmallModel(SmallModelConfig(model=draft_model(), draft=draft))
    return build_drafter(how.drafter, plugins())


def decoder_of(how: Settings, texts: Sequence[Sequence[int]], *, sampled: bool) -> SpecDecoder:
    options: dict[str, Any] = {
        "draft_tokens": how.draft_tokens,
        "max_batch": how.max_batch,
        "prefill_chunk": how.prefill_chunk,
        "reuse_prefixes": how.reuse_prefixes,
        "capture": Capture.FIXED if how.fixed_shapes else Capture.OFF,
        "strict": True,
    }
    build = partial(SpecDecoder, target(), tokenizer(), **options)
    try:
        return build(drafter=built(how, texts), verifier="match" if sampled else how.verifier)
    except IncompatiblePair:  # of law or shape
        return build(drafter=built(how, texts), verifier="greedy")


def check(rows: list[Row], how: Settings) -> None:
    """Compare every sample of every row, in two calls of one decoder, with the reference."""
    known: dict[tuple[int, int], Said] = {}

    def expected(i: int, seed: int) -> Said:
        row = rows[i]
        key = (i, 0 if row.params.greedy else seed)
        if key not in known:
            known[key] = reference(target(), tokenizer(), row.prompt, row.params, seed, row.eos)
        return known[key]

    texts = [
        [*row.prompt, *expected(i, sample_seed(row.params.seed or 0, sample)).token_ids]
        for i, row in enumerate(rows)
        for sample in range(row.params.n)
    ]
    sampled = any(not row.params.greedy for row in rows)
    entropy = Random(how.random)  # of rows without a seed: a failure can be repeated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_core.engine.requests.secrets.randbits", entropy.getrandbits)
        _compared(rows, decoder_of(how, texts, sampled=sampled), expected)


def _compared(rows: list[Row], decoder: SpecDecoder, expected: Callable[[int, int], Said]) -> None:
    each = [i for i, row in enumerate(rows) for _ in range(row.params.n)]
    for _ in range(2):
        results = decoder.generate([row.prompt for row in rows], [row.params for row in rows])
        assert len(results) == len(each)
        for i, result in zip(each, results, strict=True):
            compare(result, expected(i, result.seed), rows[i].params)
    if len(each) == 1:
        chunks = list(decoder.stream(rows[0].prompt, rows[0].params))
        compare(chunks[-1].result, said := expected(0, chunks[-1].result.seed), rows[0].params)
        assert "".join(chunk.text for chunk in chunks) == said.text


def compare(result: GenerationResult, said: Said, params: SamplingParams) -> None:
    note(f"expected {said.token_ids} {said.finish_reason} {said.text!r}")
    note(f"got      {result.token_ids} {result.finish_reason} {result.text!r}")
    assert result.token_ids == said.token_ids
    assert result.finish_reason == said.finish_reason
    assert result.text == said.text
    if params.logprobs is None:
        assert result.logprobs is None
        return
    assert result.logprobs is not None
    assert [token.token_id for token in result.logprobs] == said.token_ids
    for token, logp in zip(result.logprobs, said.logprobs, strict=True):
        assert token.logprob == pytest.approx(float(logp[token.token_id]), abs=1e-4)
        best = logp.topk(params.logprobs).values.tolist()
        assert [value for _, value in token.top] == pytest.approx(best, abs=1e-4)
        assert [float(logp[i]) for i, _ in token.top] == pytest.approx(best, abs=1e-4)


def property_test(**options: Any) -> Callable[[], None]:
    """Make the test with a number of examples."""

    @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    @given(rows=ROWS, how=SETTINGS)
    def test(rows: list[Row], how: Settings) -> None:
        check(rows, how)

    return test  # type: ignore[no-any-return]


def test_any_request_is_answered_as_without_speculation() -> None:
    property_test(max_examples=60, derandomize=True, database=None)()


@pytest.mark.slow
def test_many_more_requests_are_answered_as_without_speculation() -> None:
    property_test(max_examples=600)()
