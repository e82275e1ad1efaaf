"""The command `specdec-medusa`: train heads, and measure what they save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Target = Annotated[str, typer.Option("--target", "-t", help="Folder or hub id of the target.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16; auto: float32 on a CPU, else the target's own.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of data, initial weights and order.")]

app = typer.Typer(
    name="specdec-medusa",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Medusa heads for specdec.",
)


@app.command()
def train(
    target: Target,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the heads.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with prompt or messages (the target answers) or text; else prompts, one a line. "
            "Without it the target talks to itself."
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Number of heads.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 1,
    projection: Annotated[
        str,
        typer.Option(
            help="own: each head has a vocabulary matrix, which starts as the target's; shared: all use the "
            "target's head, and the file has residual blocks only; auto: shared above 2^24 weights a matrix."
        ),
    ] = "auto",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens to learn from.")] = 200_000,
    new_tokens: Annotated[int, typer.Option(min=4, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target's answers.")] = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many steps (2000 without --minutes).")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after so many minutes of training.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Positions of a step.")] = 512,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    held_out: Annotated[
        float, typer.Option(min=0.001, max=0.5, help="Share of sequences to measure on.")
    ] = 0.05,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out.")] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="Answers generated at once.")] = 32,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Train heads on the target's own outputs (Medusa-1: the target stays as it is)."""
    from specdec_medusa.commands import Training, run_training
    from specdec_medusa.training import Recipe

    if projection not in ("auto", "own", "shared"):
        raise typer.BadParameter(
            f"{projection!r} is unknown; use auto, own or shared", param_hint="--projection"
        )
    run_training(
        Training(
            target=target,
            out=out,
            data=data,
            projection=projection,
            tokens=tokens,
            new_tokens=new_tokens,
            temperature=temperature,
            held_out=held_out,
            resume=resume,
            max_batch=max_batch,
            device=device,
            dtype=dtype,
        ),
        Recipe(
            heads=heads,
            layers=layers,
            own_projection=projection == "own",
            batch=batch,
            rate=rate,
            seed=seed,
            steps=steps if steps or minutes else 2000,
            minutes=minutes,
        ),
    )


@app.command()
def measure(
    target: Target,
    heads: Annotated[str, typer.Option("--heads", help="Folder that `train` made.")],
    tree: Annotated[
        list[str] | None,
        typer.Option(help="Trees to measure; several times. Default: chain, measured, adaptive."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=512, help="Most nodes of a tree.")] = 24,
    rows: Annotated[int, typer.Option(min=1, help="Most held-out sequences.")] = 64,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Decode the held-out prompts with the heads, and compare with what their accuracy predicts."""
    from specdec_medusa.measuring import Measurement, run_measurement

    run_measurement(
        Measurement(
            target=target,
            heads=heads,
            trees=tuple(tree or ("chain", "measured", "adaptive")),
            nodes=nodes,
            rows=rows,
            max_batch=max_batch,
            as_json=as_json,
            device=device,
            dtype=dtype,
        )
    )


def main() -> None:
    """Run the command; what is wrong is one line, and exit code 2 for wrong use, 1 for a run that failed."""
    from specdec_core import SpecdecError, UsageError

    try:
        code: Any = app(standalone_mode=False)
    except KeyboardInterrupt:
        print("specdec-medusa: interrupted; --resume goes on from the checkpoint", file=sys.stderr)
        code = 130
    except typer.Abort:
        code = 130
    except SpecdecError as error:
        print(f"specdec-medusa: error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except Exception as error:  # typer's own wrong-use errors, wherever its release keeps their class
        if not hasattr(error, "format_message"):
            raise
        print(f"specdec-medusa: error: {error.format_message()}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
