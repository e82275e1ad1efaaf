"""specdec beside other packages for speculative decoding, each in an environment of its own, on the CPU.

Every contender (`peers_worker.py` lists them) is a process with one model, which is given one prompt at a
time: each prompt goes to all of them in turn, each time from another one on, while the others wait. Every
repeat starts all processes anew. They read the same ids (the built-in questions of `specdec bench`), decode
greedily at batch 1, and stop at the same ids. One that fails is told in one line, and the rest goes on.

Prints tokens a second (the median over repeats), for how many prompts the ids are those of `hf` in every
repeat, and how many times as fast as each contender the first one is: the geometric mean over prompts of the
median over repeats, of runs that followed each other, with its 95% interval.

    python benchmarks/peers.py MODEL --economize-python ENV/bin/python --flashspec-python ENV/bin/python \\
      --output peers.jsonl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import peers_worker
import torch
from peers_report import figures, print_figures
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from specdec_core.bench.environment import environment
from specdec_core.bench.prompts import BenchPrompt, make_prompts, wants_chat
from specdec_core.bench.questions import built_in, select
from specdec_core.bench.record import Record
from specdec_core.rows.stopping import model_eos_ids

DEFAULT = ("specdec", "none", "hf", "economize@3", "economize@10", "flashspec@4", "flashspec@6")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--economize-python", default=sys.executable, help="where economize is installed")
    parser.add_argument("--flashspec-python", default=sys.executable, help="where flashspec is installed")
    parser.add_argument(
        "--contenders", nargs="+", default=DEFAULT, metavar="NAME[@K]", help="the first leads"
    )
    parser.add_argument("--limit", type=int, help="most prompts of a category; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"), help="cpu: threads are added up")
    parser.add_argument("--output", help="JSON lines, written anew")
    options = parser.parse_args()
    if min(options.max_new_tokens, options.repeats, options.threads) < 1:
        parser.error("--max-new-tokens, --repeats and --threads must be at least 1")
    try:
        for contender in options.contenders:
            peers_worker.parse(contender)
        prompts, eos = read(options.model, options.limit)
        record = Record(options.output, overwrite=True)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    comparison = Comparison(options, prompts, eos, record)
    for repeat in range(1, options.repeats + 1):
        comparison.run(repeat)
    found = figures(record.lines, options.clock)
    for line in found:
        record.add("result", clock=options.clock, **line)
    print_figures(found)
    for line in record.of("failed"):
        print(f"\n{line['contender']} failed: {line['error']}")
    return 1 if comparison.failed else 0


def read(model: str, limit: int | None) -> tuple[list[BenchPrompt], list[int]]:
    """Encode the built-in questions; give the prompts, and the ids that end a text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    questions, chat = select(built_in(), limit=limit), wants_chat(None, tokenizer)
    assert all(len(question.turns) == 1 for question in questions)  # so nothing is answered
    prompts = make_prompts(questions, tokenizer, chat=chat, most=None, answer=lambda name, ids: "")
    try:
        generation: Any = GenerationConfig.from_pretrained(model)
    except OSError:  # none comes with it
        generation = None
    about = SimpleNamespace(config=AutoConfig.from_pretrained(model), generation_config=generation)
    return prompts, sorted(model_eos_ids(about, tokenizer))


class Failed(Exception):
    """A contender cannot go on; the message is one line."""


class Worker:
    """A contender's process, its model loaded and warm.

    Raises:
        Failed: the interpreter cannot be started, or the package cannot run the model.
    """

    def __init__(self, contender: str, python: str, job: peers_worker.Job) -> None:
        command = [python, peers_worker.__file__, contender]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
        except OSError as error:
            raise Failed(f"{python}: {error.strerror or error}") from error
        self.versions: dict[str, str] = self.ask(job)["versions"]

    def ask(self, value: Any) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(value), file=self._process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise Failed(f"its process ended with code {self._process.returncode}") from error
        if "error" in answer:
            self.close()
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


class Comparison:
    """All contenders on all prompts."""

    def __init__(
        self, options: argparse.Namespace, prompts: Sequence[BenchPrompt], eos: list[int], record: Record
    ) -> None:
        self.failed: set[str] = set()
        self._options, self._prompts, self._record = options, prompts, record
        self._contenders = list(dict.fromkeys(options.contenders))
        self._job = {name: getattr(options, name) for name in ("model", "dtype", "threads", "max_new_tokens")}
        self._job |= {"eos": eos, "warm_up": max((prompt.ids for prompt in prompts), key=len)}
        torch.set_num_threads(options.threads)
        facts = environment(torch.device("cpu"), getattr(torch, options.dtype))
        lengths = {prompt.name: len(prompt.ids) for prompt in prompts}
        asked = {"max_new_tokens": options.max_new_tokens, "repeats": options.repeats, "eos": eos}
        record.add("settings", argv=sys.argv, **facts, **asked, prompts=lengths)

    def run(self, repeat: int) -> None:
        """Measure every prompt once."""
        workers: dict[str, Worker] = {}
        for contender in self._contenders:
            if contender not in self.failed:
                self._start(contender, repeat, workers)
        for number, prompt in enumerate(self._prompts):
            names = list(workers)
            start = number % max(len(names), 1)
            for contender in [*names[start:], *names[:start]]:
                try:
                    run = workers[contender].ask(prompt.ids)
                except Failed as error:
                    del workers[contender]
                    self._fail(contender, repeat, error)
                    continue
                about = {"category": prompt.category, "prompt": prompt.name}
                self._record.add("run", contender=contender, repeat=repeat, **about, **run)
        for worker in workers.values():
            worker.close()

    def _start(self, contender: str, repeat: int, workers: dict[str, Worker]) -> None:
        name, _ = peers_worker.parse(contender)
        python = getattr(self._options, f"{name}_python", sys.executable)
        try:
            workers[contender] = Worker(contender, python, self._job)
        except Failed as error:
            self._fail(contender, repeat, error)
        else:
            versions = workers[contender].versions
            self._record.add("started", contender=contender, repeat=repeat, versions=versions)

    def _fail(self, contender: str, repeat: int, error: Failed) -> None:
        self.failed.add(contender)
        self._record.add("failed", contender=contender, repeat=repeat, error=str(error))


if __name__ == "__main__":
    sys.exit(main())
