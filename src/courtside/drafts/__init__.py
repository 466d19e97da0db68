"""Correction of the student's drafts: rank them, repair them, or criticize them."""
