"""`launch rehearse`: one rank of a world of any size, in one process, without its devices, its memory and its peers."""
