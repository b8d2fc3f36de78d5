"""What a rehearsal imports, for `harness.train.forked` to import it once."""

import transformers  # noqa: F401

import launcher.rehearse.main  # noqa: F401
