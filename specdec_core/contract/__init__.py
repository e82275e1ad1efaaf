"""The contracts: the values that pass between drafters, the loop and verifiers, and who they are."""
