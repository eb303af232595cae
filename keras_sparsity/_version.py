"""The version, in a file that setup.py can read without importing Keras."""

__version__ = "0.1.0"
