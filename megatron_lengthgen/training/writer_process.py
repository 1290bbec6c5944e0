"""Imported by the fork server that Megatron's asynchronous writers come from: they end with their rank.

A writer whose rank was killed would keep itself and the server alive, and might write where the next start does. The
server must not touch CUDA, so nothing heavy is imported here.
"""

from multiprocessing import util

from megatron_lengthgen.orphans import end_with_parent

util.register_after_fork(end_with_parent, lambda end: end())
