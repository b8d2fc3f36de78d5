"""`deepspeed.git_version_info`: the release, without a commit."""

from . import __version__ as version
from .ops import __compatible_ops__ as compatible_ops

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "version"]

git_hash = git_branch = "none"
installed_ops = compatible_ops  # they are built with the package, or not at all
