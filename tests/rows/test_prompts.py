"""Chat messages to ids: the target's template once, and nothing of the tokenizer's added to it."""

from __future__ import annotations

import pytest
from cli_support import byte_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from specdec_core import InvalidParameter
from specdec_core.rows.prompts import encode_chat, encode_prompts

USER = [{"role": "user", "content": "hi"}]


def with_bos(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with its BOS."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_a_template_that_writes_the_bos_gets_no_second_one() -> None:
    """B94."""
    tokenizer = with_bos("{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}")
    bos = tokenizer.bos_token_id
    (text,), _ = encode_prompts("hi", tokenizer)
    assert text[0] == bos
    assert encode_chat(USER, tokenizer) == text
    (chat,), many = encode_prompts(USER, tokenizer)
    assert (chat, many) == (text, False)
    assert chat.count(bos) == 1


def test_the_template_alone_decides_about_a_bos() -> None:
    tokenizer = with_bos("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert tokenizer.bos_token_id not in encode_chat(USER, tokenizer)


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "a", "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", ["a"], "can only concatenate list"),
        ("{% for %}", "a", "Expected"),
    ],
)
def test_what_a_template_refuses_is_one_line(template: str, content: object, words: str) -> None:
    with pytest.raises(
        InvalidParameter, match="the target's chat template refuses these messages: "
    ) as error:
        encode_chat([{"role": "user", "content": content}], byte_tokenizer(template))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
