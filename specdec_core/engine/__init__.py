"""Decoding: rounds, who takes part in them, and what callers see of it."""
