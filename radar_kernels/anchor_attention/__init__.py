"""Attention with a bias, or a target mass, on anchored keys."""
