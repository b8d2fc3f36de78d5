"""What is too much to be meant: a number beyond these is a typo, and must not eat the memory."""

from __future__ import annotations

MAX_SLOTS = 1_024  # of one host; no machine has more devices
MAX_EXPANSION = 65_536  # hosts of one expression or file, such as [1-99999999]
