"""Methods that are programs: other packages, each in an environment of its own.

A program reads lines of JSON from its standard input and answers each with one on its standard output. The
first is what to run on: `target`, `revision`, `device`, `dtype`, `threads`. Its answer, when the model is
there, holds `versions` of what matters, and `max_batch` if it takes so many prompts at once. Each further
line is a call: `prompts` (lists of token ids), `eos_token_ids`, `seeds` and settings of `SamplingParams`; the
answer holds the generated `token_ids` of each prompt, an end-of-text id included. One that cannot go on
answers with an `error`. At the end of its input it ends.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from specdec_core.bench.methods import MethodSpec, Run
from specdec_core.bench.stand import Stand, device_of
from specdec_core.contract.errors import SpecdecError
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.rows.stopping import eos_ids, model_eos_ids

_SETTINGS = {
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "no_repeat_ngram_size"),
}

Call = tuple[Sequence[Sequence[int]], Sequence[SamplingParams]]


class Process:
    """A program that generates; seconds are wall clock from a call's first byte to its answer's last.

    Raises:
        SpecdecError: it cannot be started, or cannot run the target.
    """

    def __init__(self, spec: MethodSpec, stand: Stand) -> None:
        self.name, self._command = spec.text, spec.command
        model = stand.plain
        self._eos = model_eos_ids(model, stand.tokenizer)
        self._job = {
            "target": stand.target,
            "revision": stand.revision,
            "device": str(device_of(model)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }
        self._longest: Call | None = None
        self._start()

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, encoding="utf-8"
            )
        except OSError as error:
            self._said.close()
            raise SpecdecError(f"{self.name}: {self._command[0]}: {error.strerror or error}") from error
        hello = self._ask(self._job)
        self.versions: dict[str, str] = hello.get("versions", {})
        self._most: int | None = hello.get("max_batch")

    def unfit(self, batch: int) -> str:
        """Say so where it takes fewer prompts at once."""
        if self._most is not None and batch > self._most:
            return f"it takes {self._most} prompt{'s' if self._most > 1 else ''} at a time"
        return ""

    def renew(self) -> None:
        """Start it anew, and warm it up with the longest prompts that it has seen."""
        self.close()
        self._start()
        if self._longest is not None:
            self.run(*self._longest)

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        """Let it generate; what it drafted it does not tell."""
        if self._longest is None or sum(map(len, prompts)) > sum(map(len, self._longest[0])):
            self._longest = (prompts, params)
        call = {
            "prompts": [list(prompt) for prompt in prompts],
            "eos_token_ids": sorted(eos_ids(params[0], self._eos)),
            **params[0].model_dump(include=_SETTINGS),
            "seeds": [one.seed for one in params],
        }
        began = time.perf_counter()
        answer = self._ask(call)
        return Run(time.perf_counter() - began, answer["token_ids"], None)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()
        self._said.close()

    def _ask(self, value: Any) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            print(json.dumps(value), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise SpecdecError(f"{self.name} {self._why(line)}") from error
        if "error" in answer:
            self.close()
            raise SpecdecError(f"{self.name}: {answer['error']}")
        return answer

    def _why(self, line: str) -> str:
        """Say what it said instead, or how it ended: its code, and the last line of its standard error."""
        if line:
            self._process.kill()
            self.close()
            return f"said {line.strip()[:100]!r}, which is no line of JSON"
        self._process.communicate()
        self._said.seek(0)
        lines = self._said.read().split("\n")
        self._said.close()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"ended with code {self._process.returncode}: {last[:300]}"
