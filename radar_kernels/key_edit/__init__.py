"""Edits of the keys at anchored positions."""
