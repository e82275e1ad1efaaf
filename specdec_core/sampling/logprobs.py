"""Log-probabilities of committed tokens under the target: of its raw logits, before any processing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """One committed token and the likeliest ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), likeliest first


def measure(logits: Tensor, path: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Take what `read` needs, as int64 so that it can ride along in the round's one transfer.

    Args:
        logits: [B, 1 + n, V] raw.
        path: int64 [B, d], accepted nodes, -1 padded.
        tokens: int64 [B, d + 1], at each index the token that follows; the entry behind the path is the
            row's own, later ones are not read.

    Returns:
        int64 [B, (d + 1) * (1 + 2 * top)]: bits of float64 logprobs, ids, bits.
    """
    index = torch.nn.functional.pad(path.clamp(min=-1) + 1, (1, 0))
    said = torch.gather(logits, 1, index.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    logp = said.float().log_softmax(dim=-1)
    chosen = logp.gather(-1, tokens.clamp(0, logits.shape[-1] - 1).unsqueeze(-1))
    parts = [_bits(chosen)]
    if top:
        values, ids = logp.topk(top, dim=-1)
        parts += [ids, _bits(values)]
    return torch.cat(parts, dim=-1).flatten(1)


def read(measured: list[int], tokens: list[int], top: int, wanted: int) -> list[TokenLogprob]:
    """Read one row's numbers on the host; of the `top` likeliest tokens measured it gives `wanted`."""
    values: list[float] = torch.tensor(measured, dtype=torch.int64).view(torch.float64).tolist()
    found = []
    for i, token in enumerate(tokens):
        at = i * (1 + 2 * top)
        ids, logprobs = measured[at + 1 : at + 1 + wanted], values[at + 1 + top : at + 1 + top + wanted]
        found.append(TokenLogprob(token, values[at], tuple(zip(ids, logprobs, strict=True))))
    return found


def _bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)
