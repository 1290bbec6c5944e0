"""Length generalisation for Megatron-Core (arXiv 2610.04518)."""

__version__ = "0.1.0"
