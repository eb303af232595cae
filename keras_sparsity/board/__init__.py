"""What a terminal and TensorBoard show of a model."""
