"""What a start of a job continues from: `--resume`, and whether the job has been started before."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from launcher.base import env
from launcher.base.record import Record

AUTO, NEVER = "auto", "never"
_IDS = (env.JOB_ID, env.TORCHELASTIC_RUN_ID, env.SLURM_JOB_ID)
_COUNTS = (env.RESTART_COUNT, env.TORCHELASTIC_RESTART_COUNT, env.SLURM_RESTART_COUNT)


class StartKind(Record):
    """One start of a job, as its ranks see it."""

    resume: str  # what `--resume` says: "auto", "never", a folder, or "" where it was not given
    is_restart: bool  # the job has been started before, by `launch`, torchrun or Slurm
    jobs: tuple[str, ...] = ()  # its ids, which all starts of it share

    @property
    def named_folder(self) -> str | None:
        """The folder that `--resume` names."""
        return None if self.resume in ("", AUTO, NEVER) else self.resume

    @property
    def resumes(self) -> bool:
        """Whether this start continues from a checkpoint, where there is one."""
        return self.resume != NEVER and (bool(self.resume) or self.is_restart)

    def folders(self, own: str | None) -> tuple[str, ...]:
        """Return where to look for a checkpoint, the first choice first. own: where the job saves.

        What a job that was started again has saved itself is newer than what it was once told to begin with.
        """
        if not self.resumes:
            return ()
        named = self.named_folder
        candidates = (own, named) if self.is_restart or named is None else (named,)
        return tuple(dict.fromkeys(folder for folder in candidates if folder is not None))

    def may_begin_in(self, own: str, owners: Collection[str]) -> bool:
        """Whether this start may save into a folder that has checkpoints already. owners: ids of jobs that did."""
        return self.resume in (AUTO, NEVER, own) or (self.is_restart and not set(self.jobs).isdisjoint(owners))


def start_kind(environ: Mapping[str, str]) -> StartKind:
    """Return what the environment of a rank says about this start."""
    counts = (environ.get(variable.name, "0") for variable in _COUNTS)
    jobs = tuple(dict.fromkeys(environ[variable.name] for variable in _IDS if environ.get(variable.name)))
    return StartKind(environ.get(env.RESUME.name, ""), any(count not in ("", "0") for count in counts), jobs)
