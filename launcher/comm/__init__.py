"""Layer 1: process groups and collectives on flat buffers."""

from launcher.comm.observe import log_summary

__all__ = ["log_summary"]
