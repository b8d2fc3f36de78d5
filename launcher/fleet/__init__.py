"""Many hosts at once, for jobs, `launch exec` and `launch check`: connect, heartbeats, output windows, stop, sweep."""
