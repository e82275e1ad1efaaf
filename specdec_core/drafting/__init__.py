"""Drafters made of drafters, and the base of those that need no model."""
