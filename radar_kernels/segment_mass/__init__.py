"""How much attention each stretch of the keys gets."""
