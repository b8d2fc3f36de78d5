"""Agents over SSH, with paramiko, and the choice between it and the system's ssh."""

WAYS = ("auto", "paramiko", "openssh")  # what speaks SSH; "auto": as the SSH config needs
