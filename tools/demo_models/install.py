"""Copy a trained pair into the package's demo folder.

python -m tools.demo_models.install TARGET DRAFT specdec_core/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER)
COMPANIONS = {"draft": "../draft", "exit_layer": 2}


def copy_model(source: Path, folder: Path) -> None:
    """Copy the files that loading needs; in a config of float32, since a CPU computes slowly in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL:
        shutil.copyfile(source / name, folder / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Copy both, and name the target's companions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("demo", type=Path)
    args = parser.parse_args()
    copy_model(args.target, args.demo / "target")
    copy_model(args.draft, args.demo / "draft")
    (args.demo / "target" / "specdec.json").write_text(json.dumps(COMPANIONS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
