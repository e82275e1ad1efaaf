"""One contender of `peers.py`, in its own process: a package and a model, given prompts one at a time.

    specdec, specdec@K      prompt_lookup, draft length `auto` or K tokens, with `--optimize auto`
    none                    specdec's plain decoding, with `--optimize auto`
    hf                      transformers' greedy generation, which tells whether ids are right
    economize, economize@K  economize's prompt lookup (`LookupConfig`), its own draft length or K tokens
    flashspec, flashspec@K  flashspec's prompt lookup (`NgramDrafter`), its own draft length or K tokens

Where it runs specdec may be missing, and the other packages are missing elsewhere: at the top it imports the
standard library alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

Job = dict[str, Any]  # model, dtype, threads, max_new_tokens, eos (a list of ids), warm_up (a prompt)
Generate = Callable[[list[int]], list[int]]  # prompt ids -> new ids, a final EOS included


def specdec(job: Job, depth: int | None, drafter: str = "prompt_lookup") -> Generate:
    from specdec_core import SamplingParams, SpecDecoder

    decoder = SpecDecoder.from_pretrained(
        job["model"],
        device="cpu",
        dtype=job["dtype"],
        drafter=drafter,
        draft_tokens=depth or "auto",
        strict=True,
        reuse_prefixes=False,  # every prompt is fed anew, as by the others
    )
    params = SamplingParams(max_new_tokens=job["max_new_tokens"], eos_token_id=job["eos"] or None)
    return lambda ids: list(decoder.generate([ids], params)[0].token_ids)


def none(job: Job, depth: int | None) -> Generate:
    return specdec(job, depth, "none")


def hf(job: Job, depth: int | None) -> Generate:
    import torch
    from transformers import GenerationConfig

    model = _load(job)
    model.generation_config = GenerationConfig()  # the one that comes with a model may hold penalties
    options = {"max_new_tokens": job["max_new_tokens"], "eos_token_id": job["eos"] or None, "pad_token_id": 0}

    def generate(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)
        return list(output[0, len(ids) :].tolist())

    return generate


def economize(job: Job, depth: int | None) -> Generate:
    import economize
    import torch
    from economize.techniques.lookup import LookupConfig

    cycle = None if depth is None else economize.DecodeConfig(cycle_length=depth + 1)  # and the target's own
    model = economize.apply(_load(job), LookupConfig(), decoding=cycle)
    limit, stop = job["max_new_tokens"], job["eos"]
    return lambda ids: list(model.decode(torch.tensor(ids), limit, stop=stop).tokens.tolist())


def flashspec(job: Job, depth: int | None) -> Generate:
    import torch
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel

    sampling = SamplingConfig(temperature=0.0, **({} if depth is None else {"gamma": depth}))
    config = FlashSpecConfig(device="cpu", dtype=job["dtype"], sampling=sampling, eos_token_ids=job["eos"])
    dtype = getattr(torch, job["dtype"])
    target = TargetModel(job["model"], torch.device("cpu"), dtype, model=_load(job))
    engine = SpeculativeEngine(config, [NgramDrafter()], target)

    def generate(ids: list[int]) -> list[int]:
        result = engine.generate(torch.tensor([ids]), max_new_tokens=job["max_new_tokens"])
        return list(result.output_ids[0, : result.n_tokens_generated].tolist())

    return generate


def _load(job: Job) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    return model.eval()


CONTENDERS: dict[str, tuple[Callable[[Job, int | None], Generate], str]] = {  # and what to install
    "specdec": (specdec, "specdec-core"),
    "none": (none, "specdec-core"),
    "hf": (hf, "transformers"),
    "economize": (economize, "economize"),
    "flashspec": (flashspec, "flashspec"),
}


def parse(contender: str) -> tuple[str, int | None]:
    """Split `name@K`.

    Raises:
        ValueError: there is no such contender, or it takes no K, or K is no whole number of at least 1.
    """
    name, at, depth = contender.partition("@")
    drafts = name not in ("none", "hf")
    if name not in CONTENDERS or (at and not (drafts and depth.isdecimal() and int(depth))):
        raise ValueError(
            f"{contender!r} is no contender; use {', '.join(CONTENDERS)}, with @K for K > 0 drafted tokens"
        )
    return name, int(depth) if at else None


def main(contender: str) -> int:
    """Take a job and then prompts from stdin, one a line; answer each on stdout with a line of JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a package prints is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        job = json.loads(sys.stdin.readline())
        name, depth = parse(contender)
        make, package = CONTENDERS[name]

        import torch

        torch.set_num_threads(job["threads"])
        generate = make(job, depth)
        generate(job["warm_up"])
        packages = dict.fromkeys([package, "torch", "transformers"])
        answer(versions={each: metadata.version(each) for each in packages})
        for line in sys.stdin:
            prompt = json.loads(line)
            began, cpu = time.perf_counter(), time.process_time()
            ids = generate(prompt)
            answer(seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu, ids=ids)
    except Exception as error:  # whatever a package raises is a finding
        answer(error=" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
