"""What everybody is promised about the output, whatever drafts: lossless, exact, bounded."""

from __future__ import annotations

import gc
from collections import Counter, deque
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import specdec_core
from specdec_core.contract.errors import SpecdecError
from specdec_core.contract.sampling_params import FinishReason, SamplingParams
from specdec_core.plugins.choice import build_verifiers, misfit
from specdec_core.testing.chances import ALARM, fits
from specdec_core.testing.contracts import Contracts, Untried, must
from specdec_core.testing.drafter_kit import LENGTHS, SAMPLED, DrafterKit, check_said, prompts_of
from specdec_core.testing.reference import law_of_texts
from specdec_core.testing.targets import ARCHITECTURES, KitTarget, loaded_target, tiny_target
from specdec_core.testing.watching import Watched

CONTRACTS: Contracts[DrafterKit] = Contracts()
ROWS, VOCAB = 800, 7
WARP = {"temperature": 0.8, "top_k": 2}


@CONTRACTS.add(
    "greedy",
    "at temperature 0 the output is that of plain decoding, on every architecture",
    "the loop guards this whatever is drafted: read the first differing token, and what the drafter does to "
    "the target's modules or cache",
    cases=(*ARCHITECTURES, "demo"),
)
def greedy(kit: DrafterKit, case: str) -> None:
    target = demo_target() if case == "demo" else kit.target if case == "llama" else tiny_target(case)
    prompts, n = prompts_of(target, *LENGTHS, seed=9), 20
    for depth in (None, "auto"):
        try:
            run = kit.run(prompts, SamplingParams(max_new_tokens=n), target=target, draft_tokens=depth)
        except SpecdecError as error:
            raise Untried(f"it does not serve {target.label}: {error}") from error
        for prompt, result in zip(prompts, run.results, strict=True):
            must(len(result.token_ids) == n or result.finish_reason != FinishReason.LENGTH, "too short")
            check_said(target, prompt, result.token_ids, f"{target.label}, a prompt of {len(prompt)}")


def demo_target() -> KitTarget:
    """The target that the package carries, where it does."""
    folder = Path(str(specdec_core.__file__)).parent / "demo" / "target"
    if not (folder / "config.json").is_file():
        raise Untried("this release carries no demo models")
    return loaded_target(str(folder))


@CONTRACTS.add(
    "sampling",
    "sampled texts have exactly the target's law, under every verifier that takes its drafts",
    "a law that is off although `law` and `draws` hold means a draft that depends on the verifier's draws: "
    "look at what `observe` feeds back",
)
def sampling(kit: DrafterKit) -> None:
    can, n = kit.capabilities, 3
    target = kit.target if kit.own_target else tiny_target(vocab=VOCAB)
    prompt = [1, 2, 3, 1, 2, 3, 1]
    law = law_of_texts(target.model, prompt, SamplingParams(**WARP), n)
    params = [SamplingParams(max_new_tokens=n, seed=seed, **WARP) for seed in range(ROWS)]
    chosen = [
        verifier
        for verifier in build_verifiers("auto", kit.registry)
        if verifier.lossless and verifier.samples and not misfit(verifier, kit.spec, can)
    ]
    must(chosen, "no lossless verifier that samples takes its drafts")
    for verifier in chosen:
        watched = Watched(kit.build(target))
        watched.keep = False
        decoder = kit.decoder(watched, target, verifier, max_batch=ROWS, reuse_prefixes=False)
        results = kit.call(decoder, watched, [prompt] * ROWS, params).results
        p = fits(Counter(tuple(one.token_ids) for one in results), law)
        must(
            p > ALARM / len(chosen),
            f"with verifier {verifier.name!r}, {ROWS} texts of {n} tokens are not of the target's law "
            f"(p = {p:.1g}; false alarms: {ALARM:.0e})",
        )


@CONTRACTS.add(
    "lengths",
    "prompts of one token, caps of one, a nearly full context, chunked prompts and an EOS in mid-block",
    "use context.host_lengths and the budget, never a length of your own; an empty draft is fine",
)
def lengths(kit: DrafterKit) -> None:
    target = kit.target if kit.own_target else tiny_target(context=64)
    limit = target.model.config.get_text_config().max_position_embeddings
    for cap in (1, 2, 3):
        for prompt in prompts_of(target, 1, 2, seed=10):
            _generate(kit, target, prompt, SamplingParams(max_new_tokens=cap), FinishReason.LENGTH, cap)
    if limit <= 512:
        for left in (1, 2, 7):
            [prompt] = prompts_of(target, limit - left, seed=11)
            _generate(kit, target, prompt, SamplingParams(max_new_tokens=50), FinishReason.CONTEXT, left)
    [prompt] = prompts_of(target, 21, seed=12)
    plenty = SamplingParams(max_new_tokens=12)
    said = _generate(kit, target, prompt, plenty, FinishReason.LENGTH, 12, prefill_chunk=4, draft_tokens=50)
    end = next((i for i, token in enumerate(said) if i > 2 and token not in said[:i]), None)
    if end is not None:
        ending = plenty.replace(eos_token_id=said[end])
        _generate(kit, target, prompt, ending, FinishReason.EOS, end + 1)


def _generate(
    kit: DrafterKit,
    target: KitTarget,
    prompt: list[int],
    params: SamplingParams,
    reason: FinishReason,
    count: int,
    **options: Any,
) -> list[int]:
    params = params if params.eos_token_id is not None else params.replace(ignore_eos=True)
    [result] = kit.run([prompt], params, target=target, **options).results
    where = f"a prompt of {len(prompt)} tokens, max_new_tokens={params.max_new_tokens}"
    must(
        (result.finish_reason, len(result.token_ids)) == (reason, count),
        f"{where}: {len(result.token_ids)} tokens ({result.finish_reason}); right are {count} ({reason})",
    )
    check_said(target, prompt, result.token_ids, where)
    said: list[int] = result.token_ids
    return said


@CONTRACTS.add(
    "device",
    "drafts, and the drafter's own tensors, are where the target is",
    "make tensors with device=context.device, and move weights in `bind` to target.device",
    cases=("cpu", "cuda"),
)
def device(kit: DrafterKit, case: str) -> None:
    if case == "cuda" and not torch.cuda.is_available():
        raise Untried("no CUDA device here")
    target = kit.target.on(case)
    prompts = prompts_of(target, *LENGTHS, seed=13)
    for params in (SamplingParams(max_new_tokens=8), SAMPLED):
        run = kit.run(prompts, params, target=target)
        if params.greedy:
            for prompt, result in zip(prompts, run.results, strict=True):
                check_said(target, prompt, result.token_ids, f"on {case}")
        elsewhere = {str(t.device) for t in _reachable(run.drafter.drafter)[1] if t.device.type != case}
        must(
            not elsewhere, f"it holds tensors on {', '.join(sorted(elsewhere))}, and the target is on {case}"
        )


@CONTRACTS.add(
    "memory",
    "nothing is left of rows that have ended: neither tensors nor entries of the drafter's own",
    "drop a row's entries in `release`, which comes for every row, also without a last `observe`",
)
def memory(kit: DrafterKit) -> None:
    if kit.capabilities.learns:
        raise Untried("it declares learns=True: what it learns must be bounded by tests of its own")
    watched = Watched(kit.build(kit.target))
    watched.keep = False
    decoder = kit.decoder(watched)
    prompts, sizes = prompts_of(kit.target, 1, 9, seed=14), []
    for call in range(8):
        params = SamplingParams(max_new_tokens=7, temperature=float(call % 2), seed=call % 2)
        kit.call(decoder, watched, prompts, params)
        if call in (3, 7):
            kept, tensors = _reachable(watched.drafter)
            sizes.append((kept, sum(tensor.untyped_storage().nbytes() for tensor in tensors), _live()))
    kinds = ("entries kept by the drafter", "bytes of tensors kept by the drafter", "live tensors")
    for kind, before, after in zip(kinds, *sizes, strict=True):
        must(after <= before, f"{kind}: {before} after 4 calls, {after} after 8 with the same prompts")


def _live() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) is Tensor)


def _reachable(root: Any) -> tuple[int, list[Tensor]]:
    """How many entries the containers hold that hang on a drafter, and the tensors among them."""
    seen, todo, tensors, entries = {id(root)}, [root], list[Tensor](), 0
    while todo:
        thing = todo.pop()
        if isinstance(thing, nn.Module):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, Tensor):
            tensors.append(thing)
        elif not isinstance(thing, _CODE) and not type(thing).__module__.startswith(_RUNTIME):
            entries += len(thing) if isinstance(thing, (dict, list, set, tuple, deque)) else 0
            new = [other for other in gc.get_referents(thing) if id(other) not in seen]
            seen.update(map(id, new))
            todo += new
    return entries, tensors


_CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_RUNTIME = ("specdec_core.engine.target", "specdec_core.model", "torch", "transformers")
