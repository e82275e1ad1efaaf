"""Distil the demo draft: the target's first two layers, trained on to say what the whole target would say.

    python -m tools.demo_models.train_draft train.jsonl TARGET FOLDER [--minutes N] [--seed S]

It starts from the target's embeddings, first layers and final norm, and learns the target's distribution
(Kullback-Leibler) and the text itself (cross-entropy). Checkpoints as in train_target.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_models.forward import hidden_states, logits
from tools.demo_models.training import Loss, Plan, arguments, export, train

TEXT_WEIGHT = 0.1


def first_layers(target: Any, layers: int) -> Qwen3ForCausalLM:
    """Copy a target's first layers, with its embeddings and final norm, as a model of their own."""
    config = Qwen3Config.from_dict(
        target.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    )
    draft = Qwen3ForCausalLM(config)
    wanted = draft.state_dict()
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in wanted})
    return draft


def loss(draft: Any, target: Any, ids: Tensor, step: int) -> Tensor:
    """Weigh the divergence from the target with the loss on the text."""
    last, end = len(draft.model.layers), len(target.model.layers)
    q = logits(draft, hidden_states(draft, ids[:, :-1], torch.bfloat16, (last,))[last]).flatten(0, 1)
    with torch.no_grad():
        p = logits(target, hidden_states(target, ids[:, :-1], torch.bfloat16, (end,))[end]).flatten(0, 1)
    divergence = -(p.softmax(-1) * log_softmax(q, -1)).sum(-1).mean()
    return (1 - TEXT_WEIGHT) * divergence + TEXT_WEIGHT * cross_entropy(q, ids[:, 1:].flatten())


def build(layers: int, target: Path) -> tuple[nn.Module, Loss]:
    """Make the draft that is not yet distilled, and its loss."""
    whole = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    draft = first_layers(whole, layers)
    return draft, partial(loss, draft, whole)


def main() -> None:
    """Distil and export."""
    parser = arguments(__doc__, "target", minutes=10)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    plan = Plan(
        minutes=args.minutes,
        batch=args.batch,
        length=512,
        workers=args.workers,
        seed=args.seed,
        matrix_rate=3e-3,
        rate=1.5e-3,
        rule_share=(0.4, 0.4),
        drill_share=(0.05, 0.05),
        port=29518,
    )
    if not args.export:
        train(partial(build, args.layers), args.rows, args.target, args.folder, plan)
    export(partial(build, args.layers), args.target, args.folder)


if __name__ == "__main__":
    main()
