"""Tests, costs and speed-ups on one GPU, within a budget of minutes; see "On a GPU" in README.md here."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_steps as steps
import torch
from gpu_measure import copy_bandwidth
from gpu_models import SHAPES
from gpu_report import markdown, marks
from gpu_subject import TINY, Sizes, Subject, random_subject, real_subject

from specdec_core import Registry
from specdec_core.bench.environment import environment
from specdec_core.model.faster.compiled import why_not_compiled

ROOT = Path(__file__).resolve().parents[1]
DRAFT_OF = {"1.7B": "0.6B", "8B": "0.6B", "tiny": "tiny-draft"}
SPARE = 1.25  # memory for a model's weights, and what else it needs


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
        print(f"[{line['at']:6.1f} s] {step}: " + json.dumps(values), flush=True)
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

    def measure(
        self, step: str, needs: float, lines: Callable[[], Iterable[steps.Line]], **tags: Any
    ) -> bool:
        """Do a step that gives lines."""
        name = " ".join([step, *map(str, tags.values())])

        def work() -> None:
            for line in lines():
                self.note(step, **tags, **line)

        return self.step(name, needs, work)


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


def check_model(check: Check, subject: Subject, modes: Sequence[str], cuda: bool) -> None:
    """Measure one model, what matters most first."""
    sizes, tags, scale = subject.sizes, {"model": subject.name}, 1.0 if cuda else 0.0
    near, far = sizes.slots
    for mode in [m for m in ("graphs", "eager") if m in modes]:
        check.measure("plain", 15 * scale, partial(steps.plain_speed, subject, mode), mode=mode, **tags)
    check.measure("hf", 20 * scale, partial(steps.hf_speed, subject), **tags)
    if "graphs" in modes:
        tags["mode"] = "graphs"
        cost = partial(steps.block_costs, subject, "graphs")
        speculation = partial(steps.speculation, subject, "graphs")
        check.measure("cost", 15 * scale, partial(cost, 1, near), **tags)
        if cuda:
            check.measure("transfers", 15, partial(steps.transfers, subject, "graphs"), **tags)
        check.measure("speculation", 40 * scale, partial(speculation, drafts=list(subject.drafts)), **tags)
        for batch, slots in ((sizes.batch, near), (1, far), (sizes.batch, far)):
            check.measure("cost", 25 * scale, partial(cost, batch, slots), **tags)


def check_more(check: Check, subject: Subject, modes: Sequence[str], cuda: bool) -> None:
    """Measure what takes longest: compiled, and eager speculation."""
    name, scale = subject.name, 1.0 if cuda else 0.0
    reason = why_not_compiled(subject.stand.plain.device)
    if "compiled" in modes and reason:
        check.note("skipped", name=f"compiled {name}", reason=reason)
    elif "compiled" in modes:
        tags = {"mode": "compiled", "model": name}
        check.measure("plain", 90 * scale, lambda: steps.plain_speed(subject, "compiled"), **tags)
        cost = partial(steps.block_costs, subject, "compiled", 1, subject.sizes.slots[0])
        check.measure("cost", 60 * scale, cost, **tags)
        speculation = partial(steps.speculation, subject, "compiled")
        check.measure("speculation", 40 * scale, partial(speculation, drafts=()), **tags)
        for draft in list(subject.drafts)[:1]:
            drafting = partial(speculation, drafts=[draft], chances=())
            check.measure("speculation", 120 * scale, drafting, **tags)
    if "eager" in modes:
        drafts = list(subject.drafts)[:1]
        eager = partial(steps.speculation, subject, "eager", depths=(4,), drafts=drafts)
        check.measure("speculation", 60 * scale, eager, mode="eager", model=name)


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
    sizes = TINY if options.tiny else Sizes()
    check.note("environment", **environment(device, dtype))
    rate: list[float] = []
    check.step("bandwidth", 0, lambda: rate.append(copy_bandwidth(device, sizes.copy_bytes)))
    if rate:
        check.note("bandwidth", copy_terabytes_a_second=rate[0] / 1e12)
    if not options.no_tests:
        check.step("tests", 30 if cuda else 0, lambda: run_tests(check, options.tests))
    made: tuple[Any, ...] = (Registry.discover(), sizes, device, dtype, rate[0] if rate else None)
    modes = options.modes.split(",")
    first, then = partial(check_model, modes=modes, cuda=cuda), partial(check_more, modes=modes, cuda=cuda)
    if options.target is not None:
        make = partial(real_subject, options.target, options.draft, *made)
        with_model(check, options.target, make, [first, then])
    else:
        names = ["tiny"] if options.tiny else options.sizes.split(",")
        for works in [[first, then]] if len(names) == 1 else [[first], [then]]:
            for name in names:
                with_model(check, name, partial(random_subject, name, DRAFT_OF.get(name), *made), works)
    for mark in marks(check.lines):
        print(mark)
    print(f"report: {check.out / 'report.md'}")
    return 1 if any(line["step"] == "failed" for line in check.lines) else 0


def with_model(
    check: Check, name: str, make: Callable[[], Subject], works: Sequence[Callable[..., None]]
) -> None:
    """Make a model, measure it, and give its memory back."""
    cuda = torch.cuda.is_available()
    if cuda:
        free_memory()
        free = torch.cuda.mem_get_info()[0]
        if name in SHAPES and SHAPES[name].bytes * SPARE > free:
            check.note("skipped", name=name, reason=f"{free / 1e9:.1f} GB of memory are free")
            return
    found: list[Subject] = []
    if check.step(f"make {name}", 5 if cuda else 0, lambda: found.append(make())):
        for work in works:
            work(check, found[0])


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
