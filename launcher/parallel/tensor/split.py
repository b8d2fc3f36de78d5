from typing import Any


def split_model(*a: Any, **k: Any) -> Any: ...
