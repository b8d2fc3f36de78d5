"""Hide values that look like secrets in what people read: plans, lists of jobs, reports."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "•••"
# Whole words: `--tokenizer` and `--max_tokens` hold no secrets.
_SECRET_NAMES = re.compile(
    r"(token|secret|passw(or)?d|(api|access|secret|private|wandb)[-_]?key|credentials?|auth)(?![a-z])", re.IGNORECASE
)
# What services give out: Hugging Face, GitHub, OpenAI-like, AWS, Slack, W&B (40 hex digits), JSON web tokens.
_SECRET_VALUES = re.compile(
    r"hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|xox[abprs]-[A-Za-z0-9-]{8,}"
    r"|\b[0-9a-f]{40}\b|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
# The same in JSON and YAML: `"wandb_key": "..."`, `api_key: ...`.
_SECRET_LINES = re.compile(
    rf"""(["']?[\w.-]*{_SECRET_NAMES.pattern}[\w.-]*["']?\s*:\s*)("[^"\n]*"|[^\s,}}"]+)""", re.IGNORECASE
)


def mask_text(text: str) -> str:
    """Return a config's text with secrets hidden, by the names of keys and by the form of values."""
    return _SECRET_VALUES.sub(MASK, _SECRET_LINES.sub(lambda found: f'{found[1]}"{MASK}"', text))


def mask_arguments(arguments: Iterable[str]) -> list[str]:
    """Return a command line's words with secrets hidden: `--token X`, `--api_key=X`, and values known by their form."""
    shown: list[str] = []
    follows_name = False
    for word in arguments:
        name, equals, value = word.partition("=")
        is_option = name.startswith("-") or (equals and name.isidentifier())
        if follows_name and not word.startswith("-"):
            shown.append(MASK)
        elif is_option and equals and value and _SECRET_NAMES.search(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(_SECRET_VALUES.sub(MASK, word))
        follows_name = name.startswith("-") and not equals and bool(_SECRET_NAMES.search(name))
    return shown
