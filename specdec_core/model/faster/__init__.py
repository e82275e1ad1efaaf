"""Faster forwards, from model to model: nothing here knows of speculation."""
