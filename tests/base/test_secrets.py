"""What looks like a secret is hidden, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.secrets import MASK, mask_arguments


@pytest.mark.parametrize(
    "words",
    [
        ["--token", "abc"],
        ["--hf-token=abc"],
        ["--api_key", "abc"],
        ["WANDB_API_KEY=abc"],
        ["--db", "postgres://me:abc@host/x"],
        ["hf_abcdefghijkl"],
        ["ghp_abcdefghijklmnopqrst"],
        ["AKIAABCDEFGHIJKL"],
        ["--password=abc"],
    ],
)
def test_secrets_are_hidden(words: list[str]) -> None:
    shown = " ".join(mask_arguments(words))
    assert MASK in shown
    assert "abc" not in shown.lower()


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "gpt2", "--max_tokens", "100"],
        ["--author", "me", "--key", "value"],
        ["--token", "--verbose"],
        ["--lr", "3e-4", "a=b", "https://host/path"],
    ],
)
def test_other_words_are_shown(words: list[str]) -> None:
    assert mask_arguments(words) == words


@given(st.lists(st.text()))
def test_the_number_of_words_stays(words: list[str]) -> None:
    assert len(mask_arguments(words)) == len(words)
