"""From raw logits to p."""
