"""What a measurement depends on beside its settings: versions, device, threads, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Describe the machine and the software; equal on a second start on the same machine."""
    return {
        "device": str(device),
        "device_name": _device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "specdec": metadata.version("specdec-core"),
        "commit": commit(Path(__file__).parent),
    }


def commit(folder: Path) -> str | None:
    """Give the git commit of a checkout, with a mark where files were changed since; None outside of one."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    tracked = _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
    if tracked is None:  # installed inside of somebody else's repository
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head} with changes" if changed else head


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        for line in cpu.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
