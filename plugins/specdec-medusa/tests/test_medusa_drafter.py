"""What Medusa drafts, and that nothing changes what the target says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_files import PROMPTS, says, tensors, write
from torch import Tensor
from transformers import AutoModelForCausalLM

import specdec_core
import specdec_medusa
from specdec_core import Capture, SamplingParams, SpecDecoder
from specdec_core.testing.models import tiny_model
from specdec_core.testing.reference import base
from specdec_core.testing.waiting import waits
from specdec_medusa import Medusa
from specdec_medusa.checkpoint import save_heads
from specdec_medusa.heads import Heads

N = 24
TREES: list[Any] = ["adaptive", "chain", [[0], [1], [0, 0], [1, 2], [0, 0, 1]]]


@pytest.fixture
def where(tmp_path: Path) -> str:
    """Random heads."""
    return str(write(tmp_path / "heads", tensors(heads=3)))


class Watched(Medusa):
    """Records every draft, and the text before it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: list[tuple[list[list[int]], Any]] = []

    def propose(self, context: Any, budget: Any) -> Any:
        draft = super().propose(context, budget)
        self.seen.append(([list(context.row_tokens(i)) for i in range(len(context.rows))], draft))
        return draft


def decoder(where: str, architecture: str = "qwen3", tree: Any = "adaptive", **options: Any) -> SpecDecoder:
    drafter = Watched(Medusa.Config(heads=where, tree=tree, nodes=9, top_k=4))
    return SpecDecoder(
        tiny_model(architecture), drafter=drafter, strict=True, **{"draft_tokens": None, **options}
    )


def said(decoder: SpecDecoder, prompts: list[list[int]], n: int = N, **options: Any) -> list[list[int]]:
    return [r.token_ids for r in decoder.generate(prompts, SamplingParams(max_new_tokens=n, **options))]


@torch.no_grad()
def head_state(model: Any, text: list[int]) -> Tensor:
    """What the target's head reads at the last token but one, the last that a round has fed."""
    return model.get_decoder()(input_ids=torch.tensor([text[:-1]]), use_cache=False)[0][0, -1]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma2"])
def test_each_node_is_a_candidate_of_the_head_of_its_depth(architecture: str, where: str) -> None:
    """The chain's tokens are the heads' likeliest, computed from a pass of its own."""
    made = decoder(where, architecture, tree="chain", max_batch=2)
    said(made, PROMPTS[:3])
    checked = 0
    for texts, draft in made.drafter.seen:  # type: ignore[attr-defined]
        for row, text in enumerate(texts):
            for depth in range(draft.nodes):
                if draft.parents[row, depth] >= -1:
                    state = head_state(tiny_model(architecture), text)
                    logits = says(tensors(heads=3), depth, 1, state)
                    top = logits.topk(2)
                    if top.values[0] - top.values[1] > 1e-3:
                        assert int(draft.tokens[row, depth]) == int(top.indices[0])
                        checked += 1
    assert checked > 50


def test_scores_are_products_of_the_heads_probabilities(where: str) -> None:
    made = decoder(where)
    next(rounds := made.rounds(PROMPTS[1], SamplingParams(max_new_tokens=N)))
    next(rounds)
    (text,), draft = made.drafter.seen[-1]  # type: ignore[attr-defined]
    state = head_state(tiny_model("qwen3"), text)
    heads = [says(tensors(heads=3), head, 1, state).softmax(-1) for head in range(3)]
    found = {-1: (0, 1.0)}  # node -> depth, probability
    for node, parent in enumerate(draft.parents[0].tolist()):
        depth, above = found[parent]
        found[node] = depth + 1, above * float(heads[depth][draft.tokens[0, node]])
        assert float(draft.scores[0, node]) == pytest.approx(found[node][1], rel=1e-3)
    assert len(found) == 1 + 9


@pytest.mark.parametrize("verifier", ["greedy", "match", "tree_mask"])
@pytest.mark.parametrize("tree", TREES, ids=["adaptive", "chain", "static"])
def test_a_ragged_batch_says_what_the_target_says(tree: Any, verifier: str, where: str) -> None:
    made = decoder(where, tree=tree, verifier=verifier, max_batch=3, prefill_chunk=8)
    expected = [base(tiny_model("qwen3"), prompt, N) for prompt in PROMPTS]
    assert said(made, PROMPTS) == expected
    assert said(made, PROMPTS[:1]) == expected[:1]
    assert max(draft.nodes for _, draft in made.drafter.seen) > 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_other_architectures_and_fixed_shapes(architecture: str, where: str) -> None:
    made = decoder(where, architecture, capture=Capture.FIXED)
    assert said(made, PROMPTS) == [base(tiny_model(architecture), prompt, N) for prompt in PROMPTS]


def test_with_a_seed_the_text_is_that_of_plain_sampling(where: str) -> None:
    options = {"temperature": 0.9, "top_k": 20, "seed": 5}
    plainly = SpecDecoder(tiny_model("qwen3"), drafter="none")
    assert said(decoder(where), PROMPTS, **options) == said(plainly, PROMPTS, **options)


@pytest.mark.parametrize("draft_tokens", [1, 2])
def test_a_small_budget_cuts_the_tree(draft_tokens: int, where: str) -> None:
    made = decoder(where, draft_tokens=draft_tokens)
    assert said(made, PROMPTS) == [base(tiny_model("qwen3"), prompt, N) for prompt in PROMPTS]
    drafts = [draft for _, draft in made.drafter.seen]  # type: ignore[attr-defined]
    assert max(draft.depth for draft in drafts) == draft_tokens


def test_heads_that_are_right_are_accepted(tmp_path: Path) -> None:
    """Fresh heads over a target that says one token for ever: every depth is accepted."""
    model = tiny_model("llama", fresh=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[7] = 1.0
    save_heads(Heads.fresh(4, 1, 32, model.lm_head.weight), tmp_path, {})
    drafter = Medusa(Medusa.Config(heads=str(tmp_path), tree="chain"))
    made = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    result = made.generate([2], SamplingParams(max_new_tokens=26))
    assert result.stats.acceptance_histogram == [1, 0, 0, 0, 5]  # 1 token, then five times 4 + 1


def test_no_call_waits_for_the_device(where: str) -> None:
    for tree in TREES:
        made = decoder(where, tree=tree)
        with waits(made.drafter) as names:
            said(made, PROMPTS)
        assert not names


def test_a_generation_leaves_nothing_to_the_next(where: str) -> None:
    made = decoder(where)
    for _ in range(2):
        said(made, PROMPTS)
    seen = made.drafter.seen  # type: ignore[attr-defined]
    half = len(seen) // 2
    for (_, first), (_, second) in zip(seen[:half], seen[half:], strict=True):
        assert first.tokens.equal(second.tokens)
        assert first.parents.equal(second.parents)


def test_a_target_may_ship_its_heads(tmp_path: Path) -> None:
    write(tmp_path / "medusa", tensors(heads=3))
    tiny_model("qwen3").save_pretrained(tmp_path)
    (tmp_path / "specdec.json").write_text('{"medusa": "medusa"}')
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    made = SpecDecoder(model, drafter=Medusa(Medusa.Config()), strict=True)
    assert made.drafter.capabilities.max_depth == 3
    with pytest.raises(specdec_core.UsageError, match="write medusa:heads=PATH"):
        SpecDecoder(tiny_model("qwen3"), drafter=Medusa(Medusa.Config()))


def test_it_uses_the_public_names_of_the_core_only() -> None:
    for file in Path(specdec_medusa.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specdec_core":
                assert node.module == "specdec_core", file
                assert {alias.name for alias in node.names} <= set(specdec_core.__all__), file
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.startswith("specdec_core")], file
