"""What a verifier decided, checked: a wrong verdict ends the run with an error that names the verifier.

As with drafts, types and shapes are checked on the host at once, and values on the device: flags for them
ride along in the round's one host transfer. Until they are read, what is wrong is replaced by what can be
indexed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.contract.blame import blaming, described
from specdec_core.contract.distributions import TargetDistributions
from specdec_core.contract.draft import ROOT, Draft, Verdict, on_device
from specdec_core.contract.errors import VerifierError
from specdec_core.contract.interfaces import RowRng, Verifier

_RULES = (
    "a path that does not lead from the root down the draft's nodes",
    "a next token outside the vocabulary",
)
_NOWHERE = -3  # no node's parent


@dataclass(frozen=True, eq=False, slots=True)
class CheckedVerdict:
    """A verdict that can be indexed with; a row may use it only if its flags turn out to be 0."""

    path: Tensor  # int64 [B, d]
    next_token: Tensor  # int64 [B]
    flags: Tensor  # int64 [B]: broken rules, a bit each

    @classmethod
    def none(cls, rows: int, device: torch.device) -> CheckedVerdict:
        """Make what stands for a verdict in rows that have none."""
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(nothing.new_empty((rows, 0)), nothing, nothing)

    @classmethod
    def merged(cls, parts: Sequence[tuple[CheckedVerdict, Sequence[int]]]) -> CheckedVerdict:
        """Put verdicts on different rows together; a part is a verdict and, for each of its rows, which."""
        rows, width = sum(len(index) for _, index in parts), max(part.path.shape[1] for part, _ in parts)
        like = parts[0][0].next_token
        path, next_token, flags = like.new_full((rows, width), -1), like.new_zeros(rows), like.new_zeros(rows)
        for part, index in parts:
            at = on_device(index, like.device)
            path[at, : part.path.shape[1]] = part.path
            next_token[at], flags[at] = part.next_token, part.flags
        return cls(path, next_token, flags)


def broken_verdict(verifier: Verifier, flags: int) -> VerifierError:
    """Say which rules a row's flags stand for, once they are on the host."""
    rule = " and ".join(text for bit, text in enumerate(_RULES) if flags >> bit & 1)
    return _violation(verifier.name, f"its verdict has {rule}")


def checked_verdict(verifier: Verifier, p: TargetDistributions, draft: Draft, rng: RowRng) -> CheckedVerdict:
    """Let a verifier judge a draft, and check what it says.

    Raises:
        VerifierError: it raised, or its verdict is no verdict; names the verifier.
    """

    def fault(error: BaseException) -> VerifierError:
        reason = f"verifier {verifier.name!r}: verify raised {described(error)}"
        return VerifierError(reason, verifier=verifier.name)

    try:
        verdict = verifier.verify(p, draft, rng)
    except Exception:  # only now: a context around every call would cost each round
        with blaming(fault):
            raise
    _check_on_host(verdict, draft, verifier.name)
    return _check_values(verdict, draft, p.vocab_size, verifier.name)


def _check_values(verdict: Verdict, draft: Draft, vocab_size: int, name: str) -> CheckedVerdict:
    """Replace what breaks a rule, without a host transfer, and flag it."""
    path, token = verdict.path[:, : draft.nodes], verdict.next_token
    safe_token = token.clamp(0, vocab_size - 1)
    flags = (safe_token != token).long() << 1
    if verdict.path.shape[1] > draft.nodes:
        flags = flags | (verdict.path[:, draft.nodes :] != -1).any(dim=1)
    if not path.shape[1]:
        return CheckedVerdict(path, safe_token, flags)
    safe = path.clamp(0, draft.nodes - 1)
    above = torch.where(path >= 0, path, _NOWHERE)  # behind the end of a path there is nothing
    above = torch.nn.functional.pad(above[:, :-1], (1, 0), value=ROOT)
    follows = (safe == path) & (draft.parents.gather(1, safe) == above)
    wrong = (path != -1) & ~follows
    return CheckedVerdict(path.masked_fill(wrong, -1), safe_token, flags | wrong.any(dim=1))


def _check_on_host(verdict: object, draft: Draft, name: str) -> None:
    if not isinstance(verdict, Verdict):
        raise _violation(name, f"verify must return a Verdict, not {type(verdict).__name__}")
    for part, tensor, size in (("path", verdict.path, 2), ("next_token", verdict.next_token, 1)):
        shape = f"[{draft.rows}, d]" if size == 2 else f"[{draft.rows}]"
        if not isinstance(tensor, Tensor):
            raise _violation(name, f"`{part}` must be int64 {shape}, not {type(tensor).__name__}")
        if tensor.dim() != size or tensor.shape[0] != draft.rows or tensor.dtype != torch.int64:
            given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise _violation(name, f"`{part}` must be int64 {shape}, not {given}")
        if tensor.device != draft.tokens.device:
            raise _violation(name, f"`{part}` must be on {draft.tokens.device}, not on {tensor.device}")


def _violation(name: str, rule: str) -> VerifierError:
    return VerifierError(f"verifier {name!r} broke the contract: {rule}", verifier=name, rule=rule)
