"""The sequences being generated: their tokens, text, ends and figures."""
