"""`specdec compare`: do two ways of generating say the same, and if not, is it rounding or a bug?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_core.cli import options
from specdec_core.cli.bench import REFERENCES, ChatOrRaw, chosen_questions
from specdec_core.cli.bench import Categories as Names
from specdec_core.cli.bench import Limit as Most
from specdec_core.cli.bench import Questions as QuestionFile
from specdec_core.cli.exits import Debug
from specdec_core.cli.groups import Model, grouped
from specdec_core.cli.loading import discover, say_if_demo
from specdec_core.cli.prompt import read_prompt
from specdec_core.cli.quiet import quiet, silent_transformers
from specdec_core.cli.report import print_json
from specdec_core.contract.errors import InvalidParameter, UsageError
from specdec_core.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec_core.bench.compare import Comparison
    from specdec_core.bench.methods import Method
    from specdec_core.bench.prompts import BenchPrompt

CODES = {"same": 0, "near-tie": 3, "different": 4}

Way = Annotated[
    str,
    typer.Argument(
        metavar="METHOD",
        help="none (plain decoding), a drafter such as prompt_lookup@4, with @VERIFIER as wanted, or "
        f"{REFERENCES}; as for `specdec bench`.",
        show_default=False,
    ),
]


@grouped
def compare(
    first: Way,
    second: Way,
    model: Model,
    prompt: options.Prompt = None,
    file: options.File = None,
    questions: QuestionFile = None,
    categories: Names = None,
    limit: Most = None,
    chat: ChatOrRaw = None,
    draft_tokens: options.DraftTokens = "auto",
    verifier: options.Verifier = "auto",
    max_new_tokens: options.MaxNewTokens = 64,
    ignore_eos: options.IgnoreEos = False,
    no_plugin: options.NoPlugin = None,
    as_json: options.Json = False,
    debug: Debug = False,
) -> None:
    """Generate greedily in two ways, and tell where and why the token ids part.

    Exit status: 0 all ids are the same; 3 they part at near-ties only, where rounding in the target's dtype
    may decide; 4 they part where it may not: a bug, or a lossy verifier. 1 and 2 are failures, as everywhere.
    """
    from specdec_core.bench.methods import parse_method

    target, depth = options.named_target(model.target), options.depth_of(draft_tokens)
    specs = [parse_method(text, depth, verifier) for text in (first, second)]
    if max_new_tokens < 1:
        raise InvalidParameter(f"--max-new-tokens {max_new_tokens}: nothing to compare; give at least 1")
    if (prompt or file) and (questions or categories or limit):
        raise UsageError(
            "--prompt and --file go without --questions, --categories and --limit; keep one kind"
        )
    text = None if prompt is None and file is None else read_prompt(prompt, file, chat)
    wanted = [] if text is not None else chosen_questions(questions, categories, limit)
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    with quiet(offline=model.offline, debug=debug) as out, silent_transformers(debug=debug):
        from specdec_core.bench.compare import compare as compared
        from specdec_core.bench.compare import worst
        from specdec_core.bench.replay import Replayer
        from specdec_core.bench.session import made, plain_answers
        from specdec_core.bench.stand import Stand
        from specdec_core.model.loading import load_model

        registry = discover(no_plugin or ())
        loaded, tokenizer = load_model(target, **model.loading)
        say_if_demo(model)
        stand = Stand.of(loaded, tokenizer, registry, optimize=model.optimize, target=target, **model.loading)
        prompts = plain_answers(stand, wanted, chat, params) if text is None else _one(text, tokenizer)
        found: list[Comparison] = []
        with made(specs, stand) as ways:
            pair: Any = tuple(ways)
            for one in compared(pair, prompts, params, Replayer(loaded), tokenizer):
                found.append(one)
                if not as_json:
                    print(_line(one, first, second), file=out, flush=True)
            notes = _notes(pair, params)
        outcome = worst(found)
        if as_json:
            print_json(
                {
                    "ways": [first, second],
                    "target": target,
                    "dtype": str(loaded.dtype).removeprefix("torch."),
                    "outcome": outcome.value,
                    "lossy": notes,
                    "prompts": [one.to_dict() for one in found],
                },
                out,
            )
        else:
            print(_sum(found, first, second, str(loaded.dtype).removeprefix("torch."), notes), file=out)
    raise typer.Exit(CODES[outcome.value])


def _one(text: Any, tokenizer: Any) -> list[BenchPrompt]:
    from specdec_core.bench.prompts import BenchPrompt
    from specdec_core.rows.prompts import encode_prompts

    (ids,), _ = encode_prompts(text, tokenizer)
    return [BenchPrompt("prompt", "", ids)]


def _notes(ways: tuple[Method, Method], params: SamplingParams) -> list[str]:
    from specdec_core.bench.compare import lossy

    return [f"{way.name} ends in the lossy verifier {name}" for way in ways if (name := lossy(way, params))]


def _line(one: Comparison, first: str, second: str) -> str:
    """Say what one prompt gave."""
    if one.index is None:
        return f"{one.prompt}: same, {one.lengths[0]} tokens"
    said = " and ".join(
        f"{way} {'had ended' if token is None else f'says {token} {text!r}'}"
        for way, token, text in zip((first, second), one.tokens, one.texts, strict=True)
    )
    head = f"{one.prompt}: {one.outcome.value}: at generated token {one.index} {said}"
    if one.tie is None:
        return head
    tie = one.tie
    return (
        f"{head}; top-2 logits of plain decoding are {tie.gap:.3g} apart ({tie.tokens[0]} over "
        f"{tie.tokens[1]}), theirs {tie.behind[0]:.3g} and {tie.behind[1]:.3g} below the top; rounding moves "
        f"such a gap by up to {tie.noise:.3g}"
    )


def _sum(found: list[Comparison], first: str, second: str, dtype: str, notes: list[str]) -> str:
    """Say what all prompts together mean."""
    count = {name: sum(one.outcome.value == name for one in found) for name in CODES}
    if count["different"]:
        why = "; ".join(notes) if notes else "this is a bug: please report it"
        return (
            f"{first} and {second} differ: {count['different']} of {len(found)} prompts part where rounding "
            f"in {dtype} does not explain it; {why}"
        )
    if count["near-tie"]:
        return (
            f"{first} and {second} part at near-ties of {dtype} in {count['near-tie']} of {len(found)} "
            "prompts: rounding, not a bug"
        )
    return f"{first} and {second} say the same: {len(found)} prompts, every token id"
