"""Train the demo tokenizer: byte-level BPE with a chat template; it round-trips any UTF-8 text.

python -m tools.demo_models.train_tokenizer OUT/train.jsonl FOLDER [--size N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_models.rows import END_OF_TEXT, END_OF_TURN, read_rows

SPECIAL = [END_OF_TEXT, "<|im_start|>", END_OF_TURN]
PIECES = r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train(texts: list[str], size: int) -> Tokenizer:
    """Train byte-level BPE; digits stand alone, and no piece crosses a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Train on prompts and answers of the training rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=3072)
    args = parser.parse_args()
    rows = read_rows(args.rows)
    texts = [text for row in rows for text in (row["prompt"], row["answer"])]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=train(texts, args.size),
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(args.out)
    tokens = sum(len(fast(text)["input_ids"]) for text in texts)
    print(f"{sum(len(t.encode()) for t in texts) / tokens:.3f} bytes a token, {tokens} tokens")


if __name__ == "__main__":
    main()
