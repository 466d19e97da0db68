"""The student acts, or, off-policy, somebody else has."""
