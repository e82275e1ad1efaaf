"""Options that commands share, and what their texts mean."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from specdec_core.contract.errors import InvalidParameter
from specdec_core.demo import TARGET


def whole_number(text: object) -> int:
    """Read an option's value; typer's own message would not repeat it."""
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text} is no whole number") from None


def number(text: object) -> float:
    """Read an option's value; typer's own message would not repeat it."""
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text} is no number") from None


def _model(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Model", **settings)


def _input(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Prompt", show_default=False, **settings)


def _batch(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Many prompts", **settings)


def _drafting(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Drafting", **settings)


def _sampling(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Sampling", **settings)


Target = Annotated[
    str | None,
    _model(
        "--target",
        metavar="ID_OR_PATH",
        help="Model folder, or id on the hub; `specdec models` lists what is here. Unset: the demo model.",
        show_default=False,
    ),
]
Device = Annotated[
    str, _model(metavar="NAME", help="auto (a GPU where there is one), cpu, cuda, cuda:1, ...")
]
Dtype = Annotated[
    str, _model(metavar="NAME", help="auto (the checkpoint's own), float32, bfloat16 or float16.")
]
Revision = Annotated[
    str | None, _model(metavar="NAME", help="Branch, tag or commit of a hub id.", show_default=False)
]
Offline = Annotated[bool, _model("--offline", help="Use local files only.")]
TrustRemoteCode = Annotated[
    bool, _model("--trust-remote-code", help="Run model code that comes with the checkpoint.")
]
Optimize = Annotated[
    str,
    _model(
        metavar="auto|none|LIST",
        help="Faster forwards: pack (weights, on the CPU), fuse (projections of one input), compile (takes "
        "minutes; alone: with the others), several with commas; auto is what pays at once.",
    ),
]
System = Annotated[
    str | None, _input("--system", metavar="TEXT", help="What the target is told before the conversation.")
]
Prompt = Annotated[str | None, _input("--prompt", "-p", metavar="TEXT", help="The prompt.")]
File = Annotated[
    str | None,
    _input(
        "--file",
        "-f",
        metavar="FILE",
        help="File that is the prompt, but for a last line break, or a JSON list of chat messages. "
        "Without a prompt or a file, stdin is read alike.",
    ),
]
Chat = Annotated[
    bool | None,
    _input(
        "--chat/--raw",
        help="Put the prompt into the target's chat template as one user message, or take it as it is. "
        "Unset: raw, unless it is a list of messages.",
    ),
]
Input = Annotated[
    str | None,
    _batch(
        "--input",
        metavar="FILE",
        help='File of JSON lines, - for stdin: {"prompt": TEXT} or {"messages": [...]}, with "id" and '
        "sampling options by their library names (max_new_tokens, seed, stop, ...) as wanted.",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    _batch(
        "--output",
        metavar="FILE",
        help="Where the rows of --input go, one JSON line each as it ends; rows that stand there are not "
        "generated again. Without it, stdout.",
        show_default=False,
    ),
]
MaxBatch = Annotated[
    int | None,
    _batch(metavar="N", parser=whole_number, help="Most rows at once; 8 if unset.", show_default=False),
]
Overwrite = Annotated[bool, _batch("--overwrite", help="Begin the output anew.")]
Drafter = Annotated[
    str,
    _drafting(
        metavar="NAME[:K=V,...]",
        help="What proposes tokens; `specdec drafters` lists them. Several, as in "
        "prompt_lookup,small_model:model=X, are tried in order, row by row.",
    ),
]
Verifier = Annotated[
    str,
    _drafting(
        metavar="NAME[:K=V,...]",
        help="What accepts them; auto is the best lossless one that fits. `specdec verifiers` lists them.",
    ),
]
DraftTokens = Annotated[
    str,
    _drafting(
        metavar="K|auto",
        help="Depth to draft each round, at most the drafter's own num_tokens; 0 is plain decoding. "
        "auto: what promises most tokens a second, by what was accepted and what rounds cost so far.",
    ),
]
NoPlugin = Annotated[
    list[str] | None,
    _drafting(
        metavar="NAME",
        help="Leave out a plugin or a distribution's plugins; may be repeated.",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[
    int,
    _sampling("--max-new-tokens", "-n", metavar="N", parser=whole_number, help="Most tokens to generate."),
]
MinNewTokens = Annotated[
    int, _sampling(metavar="N", parser=whole_number, help="Fewest tokens before the text may end.")
]
Temperature = Annotated[float, _sampling(metavar="T", parser=number, help="0 follows the likeliest token.")]
TopK = Annotated[
    int, _sampling(metavar="K", parser=whole_number, help="Keep the K likeliest tokens; 0 is off.")
]
TopP = Annotated[
    float, _sampling(metavar="P", parser=number, help="Keep the smallest set with this mass; 1 is off.")
]
MinP = Annotated[
    float,
    _sampling(
        metavar="P", parser=number, help="Drop tokens below this share of the likeliest one's; 0 is off."
    ),
]
RepetitionPenalty = Annotated[
    float,
    _sampling(metavar="R", parser=number, help="Above 1 makes what was said less likely; 1 is off."),
]
PresencePenalty = Annotated[
    float,
    _sampling(metavar="R", parser=number, help="Subtracted from the logits of tokens that were generated."),
]
FrequencyPenalty = Annotated[
    float, _sampling(metavar="R", parser=number, help="Subtracted for each time a token was generated.")
]
NoRepeatNgramSize = Annotated[
    int, _sampling(metavar="N", parser=whole_number, help="No N tokens in a row twice; 0 is off.")
]
Stop = Annotated[
    list[str] | None,
    _sampling(metavar="TEXT", help="End where this text is said; may be repeated.", show_default=False),
]
Seed = Annotated[
    int | None,
    _sampling(
        metavar="S",
        parser=whole_number,
        help="Same seed, same text; without one, a fresh one.",
        show_default=False,
    ),
]
IncludeStop = Annotated[bool, _sampling("--include-stop", help="Leave the stop text in.")]
IgnoreEos = Annotated[bool, _sampling("--ignore-eos", help="Generate past end-of-text tokens.")]
JsonSchema = Annotated[
    str | None,
    _sampling(metavar="FILE|TEXT", help="Say JSON of this schema, and nothing else.", show_default=False),
]
Regex = Annotated[
    str | None,
    _sampling(metavar="PATTERN", help="Say what matches this from end to end.", show_default=False),
]
Samples = Annotated[
    int,
    _sampling(
        "--samples",
        metavar="N",
        parser=whole_number,
        help="Texts to generate for a prompt; lines of --- part them, --json prints a list.",
    ),
]
Logprobs = Annotated[
    int | None,
    _sampling(
        metavar="N",
        parser=whole_number,
        help="Give each token's log-probability and those of the N likeliest, with --json or --input.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def depth_of(draft_tokens: str) -> int | Literal["auto"]:
    """Read `--draft-tokens`: a depth, or "auto".

    Raises:
        InvalidParameter: it is neither.
    """
    if draft_tokens == "auto":
        return "auto"
    if not (draft_tokens.isascii() and draft_tokens.isdigit()):
        raise InvalidParameter(
            f"--draft-tokens {draft_tokens}: it must be auto or a whole number of at least 0"
        )
    return int(draft_tokens)


def named_target(target: str | None) -> str:
    """Name the target; without one, the demo model."""
    return target or str(TARGET)
