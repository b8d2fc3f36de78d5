"""Runs as people look at them: in words, as charts, side by side, and as one page of HTML."""
