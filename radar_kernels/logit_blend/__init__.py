"""Blending the logits of two prompts, and drawing tokens from them."""
