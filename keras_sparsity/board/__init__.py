"""Plans and reports of a model, for a terminal and TensorBoard."""
