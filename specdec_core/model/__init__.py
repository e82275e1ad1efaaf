"""The model runtime: an unmodified Hugging Face model with a cache that can forget."""
