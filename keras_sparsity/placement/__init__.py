"""How each kind of variable lives and travels."""
