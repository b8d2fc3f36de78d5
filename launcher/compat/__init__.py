"""`import deepspeed` of scripts and of Hugging Face libraries, answered by the built-in engine: `install()`.

The modules that scripts get, `deepspeed`, `deepspeed.comm` and so on, are made from the table in `names.py`. Nothing of
the engine or of torch is imported before a script reads a name. Every rank that `launch` starts imports this file:
standard library only, and what is rarely needed is imported in functions.
"""

from __future__ import annotations

import os
import sys

from launcher.base import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType

AUTO, BUILTIN = "auto", "builtin"
ENGINES = (AUTO, BUILTIN)
_NAME = "deepspeed"
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TABLE = os.path.join(_FOLDER, "names.py")
_METADATA = os.path.join(_FOLDER, "deepspeed_metadata")
# These look for DeepSpeed when they are imported, once and for all.
_LOOK_AT_IMPORT = ("accelerate", "transformers.integrations.deepspeed")
# Modules of other libraries that are changed when they are imported -> the function of `changes` that does it.
_CHANGED = {
    "accelerate.state": "accelerate_on_cpu",
    "transformers.modeling_utils": "gather_initial_weights",
    "transformers.trainer": "change_trainer",
    "transformers.training_args": "patch_arguments",
    **dict.fromkeys(
        (
            "lightning.fabric.strategies.deepspeed",
            "lightning.pytorch.strategies.deepspeed",
            "lightning_fabric.strategies.deepspeed",
            "pytorch_lightning.strategies.deepspeed",
        ),
        "lightning_on_cpu",
    ),
}


def install(engine: str | None = None) -> None:
    """Let `import deepspeed` find the built-in engine, in this process. A second call changes nothing.

    Call it before the first import of transformers, accelerate or deepspeed; ranks that `launch` starts need no call.

    engine: "auto": a DeepSpeed that is installed is used, with a line that says so, and the built-in engine where there
    is none. "builtin": the built-in engine also then. None: what an earlier call or LAUNCH_ENGINE says, else "auto".
    Side effects: an entry in `sys.meta_path`, which answers for the package and for its metadata.
    Raises: EngineError for another word, and where the call comes too late to have an effect.
    """
    if engine not in (None, *ENGINES):
        raise _refusal(f'there is no engine "{engine}"', f"use {' or '.join(ENGINES)}")
    present = next((finder for finder in sys.meta_path if getattr(finder, "answers_for", None) == _NAME), None)
    wanted = engine or getattr(present, "engine", None) or os.environ.get(env.ENGINE.name) or AUTO
    if wanted not in ENGINES:
        raise _refusal(f'{env.ENGINE.name}: there is no engine "{wanted}"', f"use {' or '.join(ENGINES)}")
    loaded = sys.modules.get(_NAME)
    if loaded is not None:
        if wanted == BUILTIN and not _is_ours(loaded):
            raise _refusal(
                "DeepSpeed was imported before install()",
                'call install("builtin") before any import of deepspeed, transformers or accelerate',
            )
        return
    if present is not None:
        present.engine = wanted  # type: ignore[attr-defined]  # the class may be that of an earlier import of this file
        return
    finder = DeepSpeedFinder(wanted)
    early = next((name for name in _LOOK_AT_IMPORT if name in sys.modules), None)
    if early is not None and finder.installed() is None:
        raise _refusal(
            f"install() was called after the import of {early}, which looked for deepspeed then",
            "call it first; in a notebook restart the kernel",
        )
    sys.meta_path.insert(0, finder)


def _refusal(message: str, hint: str) -> Exception:
    from launcher.base.errors import EngineError

    return EngineError(message, hint=hint)


def _is_ours(module: object) -> bool:
    return getattr(module, "__file__", None) == _TABLE


def _can_be_imported() -> bool:
    """Whether the name of this package still finds it: a script may have a file or folder of that name beside it."""
    from importlib.util import find_spec

    spec = find_spec("launcher")
    return spec is not None and os.path.dirname(_FOLDER) in (spec.submodule_search_locations or ())


def _found_by_others(name: str) -> ModuleSpec | None:
    """Return the spec of a module on `sys.path` that another finder has."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or getattr(finder, "answers_for", None) == _NAME:
            continue
        spec: ModuleSpec | None = find_spec(name, None, None)
        if spec is not None:
            return spec
    return None


def _shown(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the spec with a loader that shows the import on the panel, in a rank of `launch`."""
    if env.PROGRESS_FILE.name not in os.environ or not _can_be_imported():
        return spec
    from launcher.compat.changes import shown_spec

    return shown_spec(spec)


def _spec_of_package() -> ModuleSpec:
    from importlib.machinery import ModuleSpec

    spec = ModuleSpec(_NAME, _PackageLoader(), origin=_TABLE, is_package=True)  # type: ignore[arg-type]  # by protocol
    spec.has_location = True
    spec.submodule_search_locations = [_METADATA]  # a folder without modules: the finder here has them
    return spec


class _PackageLoader:
    """Loads the package `deepspeed`. Libraries that only look for it import nothing of this package."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the package its names."""
        from launcher.compat.alias import fill

        fill(module)


class DeepSpeedFinder:
    """Finds the package `deepspeed`, its modules and its metadata.

    In a rank of `launch` it has this import and that of torch shown on the panel: they are most of what a start takes.
    """

    answers_for = _NAME

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._is_announced = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of our package and its modules, None for others and where the installed DeepSpeed is used.

        Where it is ours, also those of the modules in `_CHANGED`. In ranks, that of torch.
        """
        if name in _CHANGED and (self.engine == BUILTIN or self.installed() is None) and _can_be_imported():
            from launcher.compat.changes import changed_spec

            return changed_spec(name, path, _CHANGED[name])
        if name == "torch" and env.PROGRESS_FILE.name in os.environ:
            return _shown(_found_by_others(name))
        if name.startswith(f"{_NAME}."):
            is_ours = _is_ours(sys.modules.get(_NAME))
        elif name == _NAME:
            is_ours = self.engine == BUILTIN or self.installed() is None
            if not is_ours:
                self._announce()
        else:
            return None
        if not is_ours:
            return None
        if name == _NAME:
            return _spec_of_package()
        from launcher.compat.alias import spec_of

        return spec_of(name)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return the metadata of our package where it is what `import deepspeed` finds."""
        from importlib.metadata import Distribution

        wanted = None if context is None else context.name
        is_asked = wanted is None or wanted.lower() == _NAME
        if not is_asked or (self.engine != BUILTIN and self.installed() is not None):
            return []
        return [Distribution.at(_METADATA)]

    def invalidate_caches(self) -> None:
        """Do nothing: nothing is kept. `importlib.invalidate_caches()` calls it."""

    def installed(self) -> ModuleSpec | None:
        """Return the spec of a DeepSpeed that is installed. A mere folder of that name, of configs say, is none."""
        spec = _found_by_others(_NAME)
        return spec if spec is not None and spec.loader is not None and spec.has_location else None

    def _announce(self) -> None:
        if not self._is_announced and os.environ.get(env.RANK.name, "0") == "0":
            sys.stderr.write("launch: DeepSpeed is installed and is used; --engine builtin takes the built-in engine\n")
        self._is_announced = True
