"""Programs on many hosts: `launch exec`, `launch check`."""
