"""The invented market and the pages about it. Deterministic, offline, standard library only."""
