"""Attention split into its anchored part and the rest."""
