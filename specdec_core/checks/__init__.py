"""The fences: what a drafter or a verifier gives is checked before it is used."""
