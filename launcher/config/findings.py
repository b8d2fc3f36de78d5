"""What a check of a config has to say."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.positions import Path


@dataclass(frozen=True)
class Finding:
    """One thing to say about the key at `path`."""

    path: Path
    message: str
    hint: str | None = None
    at_key: bool = False  # it is about the key itself, not its value
    is_refusal: bool = False  # the config is sound, this release does not do what it asks for
    is_asserted: bool = False  # DeepSpeed asserts it: keys that do not fit together, batch sizes

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)
