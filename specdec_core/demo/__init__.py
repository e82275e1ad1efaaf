"""The demo pair: a small trained target with early exits, and a draft for it. MODEL_CARD.md describes both.

Load them in float32 on a CPU: the files are float16, in which a CPU computes slowly.
"""

from __future__ import annotations

from pathlib import Path


def demo_folder() -> Path:
    """Give the folder of the demo target; its `specdec.json` names the draft beside it."""
    return Path(__file__).parent / "target"
