"""Real words in tokens of several letters: streams, stops, chats, grammars and commands on the demo pair."""

from __future__ import annotations

import functools
import json

import pytest
from cli_support import said
from pair import ASKED, decoder, pair, prompts
from support import base, greedy

from specdec_core import SamplingParams

DRAFTERS = ["prompt_lookup", "small_model", "early_exit", "tree_top2"]
N, TURN = 40, 24


@functools.cache
def plain_text(kind: str) -> str:
    """What plain decoding says to one of the prompts."""
    model, tokenizer = pair()
    prompt = prompts()[list(ASKED).index(kind)]
    text: str = tokenizer.decode(base(model, prompt, N), skip_special_tokens=True)
    return text


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_string_across_tokens_ends_stream_and_text(drafter: str) -> None:
    """Eight letters from here and there in the text, whatever tokens and rounds they lie in."""
    text = plain_text("story")
    one = decoder(drafter)
    message = [{"role": "user", "content": ASKED["story"]}]
    for start in range(11, 90, 20):
        stop = text[start : start + 8]
        chunks = list(one.stream(message, greedy(N, stop=stop)))
        result = chunks[-1].result
        assert result is not None
        assert "".join(chunk.text for chunk in chunks) == result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        whole = pair()[1].decode(result.token_ids)
        assert stop in whole
        assert stop not in pair()[1].decode(result.token_ids[:-1])  # and not a token further


@pytest.mark.parametrize("drafter", ["small_model", "early_exit", "tree_top2"])
def test_every_turn_of_a_chat_goes_on_from_what_rejections_left(drafter: str) -> None:
    """Caches keep what was accepted, nothing of what was not: each turn says what a cold run says."""
    model, tokenizer = pair()
    one, messages, known, new = decoder(drafter, draft_tokens=None), list[dict[str, str]](), 0, 1
    for kind in ("story", "code", "count"):
        messages.append({"role": "user", "content": ASKED[kind]})
        result = one.generate(messages, greedy(TURN))
        stats = result.stats
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert result.token_ids == base(model, result.prompt_token_ids, TURN, eos=[tokenizer.eos_token_id])
        assert known <= stats.reused_tokens < known + new  # the last token said was never fed
        messages.append({"role": "assistant", "content": result.text})
        known, new = stats.prompt_tokens, stats.new_tokens


SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "done": {"type": "boolean"}},
    "required": ["title", "done"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("drafter", ["early_exit:draft=sampled", "tree_top2"])
def test_sampled_json_of_a_schema_takes_fewer_rounds(drafter: str) -> None:
    pytest.importorskip("llguidance")
    from specdec_core import grammar

    constraint = grammar.json_schema(SCHEMA, pair()[1], compact=True)
    params = SamplingParams(max_new_tokens=60, temperature=0.8, seed=5, constraint=constraint)
    verifier = "tree_mask" if "tree" in drafter else "block"
    results = decoder(drafter, verifier=verifier, draft_tokens=None).generate(prompts()[1:], params)
    for result in results:
        found = json.loads(result.text or "")
        assert list(found) == ["title", "done"]
        assert isinstance(found["title"], str)
    assert results.stats.rounds < 0.6 * results.stats.new_tokens


@pytest.mark.parametrize(
    ("drafter", "least"), [("small_model", 4.0), ("early_exit", 2.4), ("tree_top2", 3.0)]
)
def test_what_a_grammar_leaves_is_drafted(drafter: str, least: float) -> None:
    """Neither model would write digits here, so a draft that forgot the grammar would be refused."""
    pytest.importorskip("llguidance")
    from specdec_core import grammar

    params = greedy(32, constraint=grammar.regex(r"[0-9A-F]{30,40}", pair()[1]))
    results = decoder(drafter, draft_tokens=None).generate(prompts()[:3], params)
    plain = decoder("none", draft_tokens=0).generate(prompts()[:3], params)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert results.stats.tokens_per_target_call > least


@pytest.mark.parametrize("drafter", ["small_model", "tree_top2"])
def test_what_a_run_measures_the_theory_foretells(drafter: str) -> None:
    run = ("run", "--drafter", drafter, "--draft-tokens", "3", "-n", "49", "-p", ASKED["story"], "--chat")
    stats = json.loads(said(*run, "--json"))["stats"]
    shares = ",".join(map(str, stats["acceptance_by_depth"]))
    foretold = json.loads(said("theory", "--by-depth", shares, "--cost", "0.4", "--json"))
    assert len(stats["acceptance_by_depth"]) == 3
    assert foretold["table"][3]["expected_tokens"] == pytest.approx(stats["mean_acceptance_length"])
    assert stats["acceptance_by_depth"][-1] > 0.1


def test_compare_finds_the_same() -> None:
    ways = ("small_model@block", "tree_top2")
    found = json.loads(said("compare", *ways, "-n", "32", "-p", ASKED["code"], "--chat", "--json"))
    assert (found["outcome"], found["prompts"][0]["lengths"]) == ("same", [32, 32]), found
