"""Muon: matrices move along their orthogonalised momentum, everything else is AdamW's."""
