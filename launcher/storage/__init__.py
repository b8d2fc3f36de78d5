"""Layer 1: swap files on fast disks, for states that memory does not hold. Standard library only, for both sides."""
