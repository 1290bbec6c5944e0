"""Imported by that server on a machine without CUDA, which Megatron's writer asks for."""

from megatron_lengthgen import backends

backends.prepare()
