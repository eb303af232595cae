"""Plain Keras models made distributed, and back."""
