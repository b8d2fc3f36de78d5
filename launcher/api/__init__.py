"""The Python API: `launcher.run` and `launcher.submit`. Functions on ranks return results, and raise here."""
