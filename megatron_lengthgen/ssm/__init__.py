"""Mamba-2 in plain PyTorch, for machines without ``mamba_ssm``: what Megatron's ``MambaMixer`` calls."""
