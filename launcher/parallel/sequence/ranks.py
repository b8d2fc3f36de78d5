"""Which ranks have parts of the same sequences: those of the engine, or of a process group that a script names."""

from __future__ import annotations

import weakref

from torch.distributed import ProcessGroup

from launcher.comm.groups import RankGroup, world_group
from launcher.comm.mesh import current_mesh

_named: weakref.WeakKeyDictionary[ProcessGroup, RankGroup] = weakref.WeakKeyDictionary()


def sequence_ranks(group: ProcessGroup | None = None) -> RankGroup | None:
    """Return the ranks of `group`, None where it has a single one.

    group: None for those of the engine that was built last; before the first, and where its mesh has no sequence axis,
    there are none.
    """
    mesh = current_mesh()
    own = None if mesh is None else mesh.sequence
    if group is None or (own is not None and own.process_group is group):
        return own
    if group.size() == 1:
        return None
    if group not in _named:
        _named[group] = (world_group() if mesh is None else mesh.world).of_ranks(group)
    return _named[group]
