"""Other packages for speculative decoding as methods of `specdec bench`, each in an environment of its own.

    economize, economize@K  economize's prompt lookup (`LookupConfig`), its own draft length or K tokens
    flashspec, flashspec@K  flashspec's prompt lookup (`NgramDrafter`), its own draft length or K tokens

One is the program of a method: -m "process:economize@3=ENV/bin/python benchmarks/peers.py economize@3".
Where it runs specdec may be missing: at the top it imports the standard library alone. Greedy, and one prompt
at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

Job = dict[str, Any]  # target, revision, device, dtype, threads
Call = dict[str, Any]  # prompts, eos_token_ids, max_new_tokens, temperature, ...
Generate = Callable[[Call], list[int]]  # of the one prompt: new ids, a final EOS included


def economize(job: Job, depth: int | None) -> Generate:
    import economize
    import torch
    from economize.techniques.lookup import LookupConfig

    cycle = None if depth is None else economize.DecodeConfig(cycle_length=depth + 1)  # and the target's own
    model = economize.apply(_load(job), LookupConfig(), decoding=cycle)

    def generate(call: Call) -> list[int]:
        ids = torch.tensor(call["prompts"][0])
        return list(model.decode(ids, call["max_new_tokens"], stop=call["eos_token_ids"]).tokens.tolist())

    return generate


def flashspec(job: Job, depth: int | None) -> Generate:
    import torch
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel

    sampling = SamplingConfig(temperature=0.0, **({} if depth is None else {"gamma": depth}))
    dtype, device = getattr(torch, job["dtype"]), torch.device(job["device"])
    target = TargetModel(job["target"], device, dtype, model=_load(job))
    engines: dict[tuple[int, ...], Any] = {}  # by the ids that end a text, which are part of its settings

    def generate(call: Call) -> list[int]:
        ends = tuple(call["eos_token_ids"])
        if ends not in engines:
            config = FlashSpecConfig(
                device=job["device"], dtype=job["dtype"], sampling=sampling, eos_token_ids=list(ends)
            )
            engines[ends] = SpeculativeEngine(config, [NgramDrafter()], target)
        ids = torch.tensor(call["prompts"])
        result = engines[ends].generate(ids, max_new_tokens=call["max_new_tokens"])
        return list(result.output_ids[0, : result.n_tokens_generated].tolist())

    return generate


def _load(job: Job) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"dtype": getattr(torch, job["dtype"]), "revision": job["revision"] or "main"}
    model: Any = AutoModelForCausalLM.from_pretrained(job["target"], **options)
    return model.to(job["device"]).eval()


PEERS: dict[str, Callable[[Job, int | None], Generate]] = {"economize": economize, "flashspec": flashspec}


def parse(peer: str) -> tuple[str, int | None]:
    """Split `name@K`.

    Raises:
        ValueError: there is no such package here, or K is no whole number of at least 1.
    """
    name, at, depth = peer.partition("@")
    if name not in PEERS or (at and not (depth.isdecimal() and int(depth))):
        raise ValueError(f"{peer!r} is no peer; use {', '.join(PEERS)}, with @K for K > 0 drafted tokens")
    return name, int(depth) if at else None


def main(peer: str) -> int:
    """Speak as `specdec_core.bench.process` says."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a package prints is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        name, depth = parse(peer)
        job = json.loads(sys.stdin.readline())

        import torch

        torch.set_num_threads(job["threads"])
        generate = PEERS[name](job, depth)
        packages = (name, "torch", "transformers")
        answer(versions={each: metadata.version(each) for each in packages}, max_batch=1)
        for line in sys.stdin:
            call = json.loads(line)
            if call["temperature"]:
                raise ValueError("here it decodes greedily alone; leave out temperatures above 0")
            answer(token_ids=[generate(call)])
    except Exception as error:  # whatever a package raises is a finding
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
