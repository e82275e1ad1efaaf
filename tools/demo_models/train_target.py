"""Train the demo target: a small Qwen3 that can exit after layers 2 and 3.

    python -m tools.demo_models.train_target train.jsonl TOKENIZER FOLDER [--minutes N] [--seed S]

FOLDER/checkpoint.pt is written every few minutes, and taken up again when the script is started anew; the
finished model goes to FOLDER. Exit losses and layer dropout follow LayerSkip (Elhoushi et al. 2024, arXiv
2404.16710).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tools.demo_models.forward import head_weights, hidden_states, logits
from tools.demo_models.training import Loss, Plan, arguments, export, train

EXITS, EXIT_WEIGHT, DROPOUT = (2, 3), 0.5, 0.1
GUIDED_HEADS, GUIDE_WEIGHT, GUIDE_EVERY = (0, 0), 0.2, 4


def config(tokenizer: Any) -> Qwen3Config:
    """Describe the target: eight layers, 5.5 million parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )


def dropped(layers: int) -> set[int]:
    """Draw the layers to leave out; the chance grows exponentially with the depth, up to DROPOUT."""
    chances = [DROPOUT * (math.exp(i * math.log(2) / (layers - 1)) - 1) for i in range(layers)]
    draws = torch.rand(layers).tolist()
    return {i + 1 for i, (draw, chance) in enumerate(zip(draws, chances, strict=True)) if draw < chance}


def loss(model: Any, ids: Tensor, step: int) -> Tensor:
    """Weigh the loss at the end with that at one of the exits, which take turns, on half of the rows."""
    layers, at = len(model.model.layers), EXITS[step % len(EXITS)]
    states = hidden_states(model, ids[:, :-1], torch.bfloat16, (at, layers), dropped(layers))
    half = max(1, len(ids) // 2)
    last = cross_entropy(logits(model, states[layers]).flatten(0, 1), ids[:, 1:].flatten())
    early = cross_entropy(logits(model, states[at][:half]).flatten(0, 1), ids[:half, 1:].flatten())
    whole = (last + EXIT_WEIGHT * early) / (1 + EXIT_WEIGHT)
    return whole if step % GUIDE_EVERY else whole + GUIDE_WEIGHT * guide(model)


def guide(model: Any, rows: int = 3, length: int = 256) -> Tensor:
    """Show two heads where to look, on random tokens that come again: the loss of their attention.

    One head of layer 1 shall look at the token before, one of layer 2 at what followed this token last time:
    an induction head (Olsson et al. 2022, arXiv 2209.11895). Left to itself, so short a training finds none.
    """
    ids, period = repeated(model, rows, length)
    before, again = head_weights(model, ids, GUIDED_HEADS)
    return -(before.diagonal(-1, 1, 2).mean() + again.diagonal(1 - period, 1, 2)[:, 1:].mean())


def repeated(model: Any, rows: int, length: int) -> tuple[Tensor, int]:
    """Draw random tokens that come again and again: [rows, length], and after how many."""
    period = int(torch.randint(4, length // 2, ()))
    ids = torch.randint(3, model.config.vocab_size, (rows, period))
    return ids.repeat(1, length // period + 1)[:, :length], period


def look_back(model: Any, steps: int, rate: float = 2e-2) -> None:
    """Teach the two heads alone, before the training: ten times cheaper than whole steps.

    Only the attention of the first two layers moves, and the embeddings get one part in common: without it no
    query and no key is the same for every token, and a head cannot look at a place whatever stands there.
    """
    embeddings = model.get_input_embeddings().weight.data
    embeddings += torch.randn(embeddings.shape[1]) * embeddings.std()
    parts = [p for layer in model.model.layers[:2] for p in layer.self_attn.parameters()]
    matrices, norms = [p for p in parts if p.ndim == 2], [p for p in parts if p.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(norms, lr=rate)
    for step in range(steps):
        lost = guide(model, rows=2)
        muon.param_groups[0]["lr"] = rate * min(1.0, 2 - 2 * step / steps)
        lost.backward()  # type: ignore[no-untyped-call]
        muon.step()  # type: ignore[no-untyped-call]
        adam.step()
        model.zero_grad()
        if step % 50 == 0:
            print(f"guide step {step}, loss {lost.item():.2f}", flush=True)


def build(tokenizer: Path) -> tuple[nn.Module, Loss]:
    """Make the untrained target and its loss."""
    model = Qwen3ForCausalLM(config(AutoTokenizer.from_pretrained(tokenizer)))
    return model, partial(loss, model)


def start(tokenizer: Path, folder: Path, steps: int, seed: int) -> None:
    """Write the first checkpoint: an untrained target, but for the two guided heads."""
    torch.manual_seed(seed)
    model, _ = build(tokenizer)
    look_back(model, steps)
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "step": 0, "seconds": 0.0}
    torch.save(state, folder / "checkpoint.pt")


def main() -> None:
    """Train and export."""
    parser = arguments(__doc__, "tokenizer", minutes=90)
    parser.add_argument("--guide-steps", type=int, default=300)
    args = parser.parse_args()
    plan = Plan(
        minutes=args.minutes,
        batch=args.batch,
        length=512,
        workers=args.workers,
        seed=args.seed,
        matrix_rate=6e-3,
        rate=4e-3,
        rule_share=(0.5, 0.35),
        drill_share=(0.3, 0.03),
        port=29517,
    )
    if not args.export:
        if not (args.folder / "checkpoint.pt").is_file():
            start(args.tokenizer, args.folder, args.guide_steps, args.seed)
        train(build, args.rows, args.tokenizer, args.folder, plan)
    export(build, args.tokenizer, args.folder)


if __name__ == "__main__":
    main()
