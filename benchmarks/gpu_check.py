"""Tests, and `specdec bench` on one GPU within a budget of minutes; see "On a GPU" in README.md here."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_models import SHAPES, Subject, Synthetic, bytes_read, random_subject, real_subject
from gpu_report import markdown, marks

from specdec_core import Capture, SamplingParams
from specdec_core.bench.environment import environment
from specdec_core.bench.methods import parse_methods
from specdec_core.bench.ours import settle
from specdec_core.bench.questions import Question
from specdec_core.bench.record import Record
from specdec_core.bench.session import BenchOptions, run_bench
from specdec_core.model.faster.compiled import why_not_compiled

ROOT = Path(__file__).resolve().parents[1]
DRAFT_OF = {"1.7B": "0.6B", "8B": "0.6B", "tiny": "tiny-draft"}
SPARE = 1.25  # memory for a model's weights, and what else it needs
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 64)  # of the blocks that are timed
TIMED = 81  # tokens that their timing commits at least: nine cycles
DEPTHS = (2, 4, 6)
REPLAYS = ("synthetic:chance=0.6", "synthetic:chance=0.9")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    slots: tuple[int, int] = (512, 4096)
    batch: int = 16
    new: int = 64
    new_eager: int = 24
    repeats: int = 3
    copy_bytes: int = 1 << 30

    def prompt(self, text: list[int], slots: int) -> list[int]:
        """Take a prompt, so long that all that is measured behind it sees one view of so many slots."""
        return text[: slots - WIDTHS[-1] - max(TIMED, self.new + max(DEPTHS)) - 2]


TINY = Sizes((256, 512), batch=3, new=24, new_eager=12, repeats=1, copy_bytes=1 << 20)


class Check:
    """The record of a run, and its time."""

    def __init__(self, out: Path, minutes: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.lines = out, list[dict[str, Any]]()
        (out / "results.jsonl").write_text("", encoding="utf-8")
        self._began, self._seconds = time.monotonic(), 60 * minutes

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._seconds - (time.monotonic() - self._began)

    def note(self, step: str, **values: Any) -> None:
        """Write a line, and say it."""
        line = {"step": step, "at": round(self._seconds - self.left, 1), **values}
        self.lines.append(line)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        said = {name: value for name, value in values.items() if name != "report"}
        print(f"[{line['at']:6.1f} s] {step}: " + json.dumps(said), flush=True)
        (self.out / "report.md").write_text(markdown(self.lines), encoding="utf-8")

    def step(self, name: str, needs: float, work: Callable[[], object]) -> bool:
        """Do a piece of work if there is time; what it raises is told, and the rest goes on."""
        if self.left < needs:
            self.note("skipped", name=name, reason=f"{self.left:.0f} s left, about {needs:.0f} s needed")
            return False
        try:
            work()
        except Exception as error:  # whatever it is: the other figures are wanted all the same
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            with (self.out / "failures.txt").open("a", encoding="utf-8") as file:
                file.write(f"{name}\n{traceback.format_exc()}\n")
            self.note("failed", name=name, reason=reason)
            return False
        finally:
            free_memory()
        return True


class Bench:
    """`specdec bench` on one subject: the report of each step is a line of the record."""

    def __init__(self, check: Check, subject: Subject, sizes: Sizes, *, cuda: bool) -> None:
        self.check, self.subject, self._sizes, self._cuda = check, subject, sizes, cuda

    def __call__(
        self,
        what: str,
        mode: str,
        needs: float,
        methods: Sequence[str] = (),
        *,
        slots: int | None = None,
        new: int | None = None,
        batches: Sequence[int] = (1,),
        widths: Sequence[int] = (),
    ) -> None:
        """Measure methods beside plain decoding, and blocks; `needs`: about the seconds it takes on a GPU."""
        slots = slots or self._sizes.slots[0]
        prompt = self._sizes.prompt(self.subject.text, slots)
        file = self.check.out / "records" / f"{Path(self.subject.name).name}-{mode}-{what}.jsonl"
        capture = {"eager": Capture.OFF}.get(mode, Capture.GRAPHS if self._cuda else Capture.FIXED)
        options = BenchOptions(
            target=self.subject.name,
            questions=[Question("prompt", "prompt", (tuple(prompt),))],
            source="gpu_check",
            methods=parse_methods(methods),
            params=SamplingParams(max_new_tokens=new or self._sizes.new, ignore_eos=True),
            batches=batches,
            repeats=self._sizes.repeats,
            chat=False,
            optimize="compile" if mode == "compiled" else "none",
            capture=capture,
            widths=widths,
        )

        def work() -> None:
            record = Record(str(file), overwrite=True)
            about, registry = (self.subject.model, self.subject.tokenizer), self.subject.registry
            report = run_bench(*about, options, record, registry=registry, shared=True, offline=True)
            self._learn(prompt, record)
            tags = {"model": self.subject.name, "mode": mode, "what": what, "slots": slots}
            self.check.note("bench", **tags, report=report)

        name = f"{what} {mode} {self.subject.name}"
        self.check.step(name, needs if self._cuda else 0, work)

    def _learn(self, prompt: list[int], record: Record) -> None:
        """Let the replaying drafter know the longest text that plain decoding gave."""
        for unit in record.of("unit"):
            said, known = unit["runs"]["none"]["token_ids"][0], Synthetic.texts.get(tuple(prompt), [])
            if len(prompt) + len(said) > len(known):
                Synthetic.learn(prompt, said)


def check_model(bench: Bench, sizes: Sizes, modes: Sequence[str]) -> None:
    """Measure one model, what matters most first."""
    far, small = sizes.slots[1], 4
    if "graphs" in modes:
        bench("plain", "graphs", 45, ["hf"], widths=WIDTHS)
        drafters = [*REPLAYS, *bench.subject.drafts]
        bench("speculation", "graphs", 60, [f"{name}@{k}" for k in DEPTHS for name in drafters])
        bench("batch", "graphs", 25, new=small, batches=[sizes.batch], widths=WIDTHS)
        bench("far", "graphs", 45, slots=far, new=small, batches=[1, sizes.batch], widths=WIDTHS)
    if "eager" in modes:
        bench("plain", "eager", 15, [] if "graphs" in modes else ["hf"], new=sizes.new_eager)


def check_more(bench: Bench, sizes: Sizes, modes: Sequence[str]) -> None:
    """Measure what takes longest: compiled, and eager speculation."""
    replays = [f"{name}@4" for name in REPLAYS]
    reason = why_not_compiled(bench.subject.model.device)
    if "compiled" in modes and reason:
        bench.check.note("skipped", name=f"compiled {bench.subject.name}", reason=reason)
    elif "compiled" in modes:  # models of each size compile the same code anew; dynamo would give up at 8
        torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
        bench("speculation", "compiled", 150, replays, widths=WIDTHS)
    if "eager" in modes:
        drafts = [f"{name}@4" for name in bench.subject.drafts[:1]]
        bench("speculation", "eager", 60, [*replays, *drafts], new=sizes.new_eager)


def run_tests(check: Check, paths: Sequence[str]) -> None:
    """Run the GPU-marked tests in a process of their own; a fifth of the time left is theirs at most."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "0"]
    command += ["--continue-on-collection-errors", *(paths or files_with_gpu_tests())]
    limit = max(check.left / 5, 30)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the tests took more than {limit:.0f} s") from None
    (check.out / "tests.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    check.note("tests", status=done.returncode, result=said[-1] if said else "nothing was said")


def files_with_gpu_tests() -> list[str]:
    """Find where tests bear the mark, or use the fixture `device`: to collect all takes long."""
    wanted = ("pytest.mark.gpu", "device: torch.device")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if any(text in file.read_text(encoding="utf-8") for text in wanted)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; 0 if every step ran, whether or not the marks are met."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
    if not cuda and not options.tiny:
        print("gpu_check: no CUDA device is here; with --tiny it runs on the CPU", file=sys.stderr)
        return 2
    check = Check(Path(options.out), options.minutes)
    make_known(check.out)
    dtype = torch.float32 if options.tiny and not cuda else torch.bfloat16
    sizes, modes = TINY if options.tiny else Sizes(), options.modes.split(",")
    check.note("environment", **environment(device, dtype))
    check.step("bandwidth", 0, lambda: note_bandwidth(check, device, sizes.copy_bytes))
    if not options.no_tests:
        check.step("tests", 30 if cuda else 0, lambda: run_tests(check, options.tests))
    works = [partial(work, sizes=sizes, modes=modes) for work in (check_model, check_more)]
    if options.target is not None:
        make = partial(real_subject, options.target, options.draft, device, dtype)
        with_model(check, options.target, make, works, sizes, cuda)
    else:
        names = ["tiny"] if options.tiny else options.sizes.split(",")
        for some in [works] if len(names) == 1 else [works[:1], works[1:]]:
            for name in names:
                make = partial(random_subject, name, DRAFT_OF.get(name), sizes.slots[1], device, dtype)
                with_model(check, name, make, some, sizes, cuda)
    for mark in marks(check.lines):
        print(mark)
    print(f"report: {check.out / 'report.md'}")
    return 1 if any(line["step"] == "failed" for line in check.lines) else 0


def with_model(
    check: Check,
    name: str,
    make: Callable[[], Subject],
    works: Sequence[Callable[[Bench], None]],
    sizes: Sizes,
    cuda: bool,
) -> None:
    """Make a model, measure it, and give its memory back."""
    if cuda:
        free_memory()
        free = torch.cuda.mem_get_info()[0]
        if name in SHAPES and SHAPES[name].bytes * SPARE > free:
            check.note("skipped", name=name, reason=f"{free / 1e9:.1f} GB of memory are free")
            return
    found: list[Subject] = []
    if check.step(f"make {name}", 5 if cuda else 0, lambda: found.append(make())):
        check.note("model", model=name, bytes_read=bytes_read(found[0].model))
        for work in works:
            work(Bench(check, found[0], sizes, cuda=cuda))


def note_bandwidth(check: Check, device: torch.device, size: int) -> None:
    """Measure the device's own copy: bytes read and written a second."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    rates = []
    for _ in range(5):
        settle(device)
        began = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        settle(device)
        rates.append(10 * 2 * size / (time.perf_counter() - began))
    check.note("bandwidth", copy_terabytes_a_second=statistics.median(rates) / 1e12)


def free_memory() -> None:
    """Give back what earlier decoders, which hold themselves in cycles, had on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_known(out: Path) -> None:
    """Let a checkout that is not installed be found as the distribution that it would be.

    Plugins are found by the entry points of installed distributions: those of pyproject.toml are written
    into a folder on the path, of this process and of its children.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        metadata.version(project["name"])
        return
    except metadata.PackageNotFoundError:
        pass
    site = out.resolve() / "site"
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(head, encoding="utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    sys.path.append(str(site))
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(site)) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", default="gpu_check", help="folder for results.jsonl and report.md")
    parser.add_argument("--minutes", type=float, default=10, help="the time there is (default 10)")
    parser.add_argument("--target", help="a real checkpoint instead of random weights: a local folder")
    parser.add_argument("--draft", help="the small model that drafts for it: a local folder")
    parser.add_argument("--sizes", default="1.7B,8B,0.6B", help="shapes of random weights, in this order")
    parser.add_argument("--modes", default="graphs,eager,compiled", help="how forwards run")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script, also on a CPU")
    parser.add_argument("--tests", nargs="*", default=[], help="where tests are; default: those for a GPU")
    parser.add_argument("--no-tests", action="store_true", help="run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
