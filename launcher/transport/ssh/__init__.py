"""Agents over SSH, with paramiko, and the choice between it and the system's ssh."""
