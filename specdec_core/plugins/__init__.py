"""Finding, loading, naming and choosing drafters and verifiers."""
