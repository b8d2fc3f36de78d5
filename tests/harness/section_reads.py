"""Which keys of a config the package reads: attributes of expressions whose type is a section of the schema.

Types come from annotations and assignments, module by module, without running anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from launcher.config.fields import Section, section_of
from launcher.config.schema import Config

_CONFIGS = ("parts.settings", "self._parts.settings")  # of `EngineParts`
Read = tuple[type[Section], str]  # the section that has the key, the key


def keys_read(sources: Path) -> set[Read]:
    """Return every key that a module reads. sources: the module, or a folder of them."""
    paths = [sources] if sources.is_file() else sorted(sources.rglob("*.py"))
    return {read for path in paths for read in _Module(ast.parse(path.read_text())).reads()}


def _sections(root: type[Section] = Section) -> Iterator[type[Section]]:
    for section in root.__subclasses__():
        yield section
        yield from _sections(section)


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._by_name = {section.__name__: section for section in _sections()}
        self._types: dict[str, type[Section]] = {}  # of names and of `self.name`, as the source writes them

    def reads(self) -> Iterator[Read]:
        """Yield the keys that this module reads."""
        for parts in (self._tree.body, *(node.body for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef))):
            self._learn(parts)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                yield from self._of_function(node)

    def _learn(self, statements: list[ast.stmt]) -> None:
        """Note the types of a class's fields and of what its methods assign to `self`."""
        for statement in statements:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self._note(f"self.{statement.target.id}", self._annotated(statement.annotation))
            elif isinstance(statement, ast.FunctionDef):
                list(self._of_function(statement))

    def _of_function(self, function: ast.FunctionDef) -> Iterator[Read]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for name in [name for name in self._types if not name.startswith("self.")]:
            del self._types[name]
        for argument in arguments:
            self._note(argument.arg, self._annotated(argument.annotation))
        for node in ast.walk(function):  # by depth: an assignment comes before what is nested deeper
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                    self._assign(target, node.value)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (section := self._type_of(node.value)) is not None:
                yield section, node.attr

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, of_part in zip(target.elts, value.elts, strict=True):
                self._assign(part, of_part)
        else:
            self._note(ast.unparse(target), self._type_of(value))

    def _note(self, name: str, section: type[Section] | None) -> None:
        if section is not None:
            self._types[name] = section

    def _annotated(self, annotation: ast.expr | None) -> type[Section] | None:
        words = ast.unparse(annotation).split(" | ") if annotation is not None else []
        return next((self._by_name[word] for word in words if word in self._by_name), None)

    def _type_of(self, value: ast.expr) -> type[Section] | None:
        if (known := self._types.get(ast.unparse(value))) is not None:
            return known
        if ast.unparse(value) in _CONFIGS:
            return Config
        if isinstance(value, ast.Call):
            return self._by_name.get(ast.unparse(value.func))
        if isinstance(value, ast.BoolOp):
            return next((found for part in value.values if (found := self._type_of(part)) is not None), None)
        if isinstance(value, ast.Attribute):
            owner = self._type_of(value.value)
            return section_of(owner, value.attr) if owner is not None and value.attr in owner.model_fields else None
        return None
