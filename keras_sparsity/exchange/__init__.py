"""Rows between those that need them and those that own them."""
