"""Agents over SSH, with paramiko."""
