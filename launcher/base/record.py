"""Immutable values for what every process of a job imports: a dataclass without the price of one.

`dataclasses` writes and compiles source text for each class, 0.45 ms for a frozen one, and needs 5 ms of imports. That
is nothing once, and a third of the start-up of an agent. Everywhere else a frozen dataclass is the better choice.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object):
        """Do nothing: it tells type checkers that subclasses of `Record` are built like dataclasses."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True)
class Record:
    """Base: the annotated names of a subclass are its fields, in order, and its class attributes their defaults."""

    if TYPE_CHECKING:
        field_names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.field_names = tuple(cls.__dict__.get("__annotations__", ()))  # noqa: RUF063  # `inspect` is what this file saves

    def __init__(self, *values: Any, **named: Any) -> None:
        given = dict(zip(self.field_names, values, strict=False)) | named
        missing = [name for name in self.field_names if name not in given and not hasattr(type(self), name)]
        if missing or len(given) != len(values) + len(named) or not given.keys() <= set(self.field_names):
            raise TypeError(f"{type(self).__name__} has the fields {self.field_names}, got {values} and {named}")
        self.__dict__.update(given)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((type(self), *self.as_dict().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in order."""
        return {name: getattr(self, name) for name in self.field_names}
