"""What torchrun starts for ``test_te_checkpoints.py``: torchrun two_ranks.py OUT

A file of its own, because the CPU backend must be in place before anything imports Megatron.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from megatron_lengthgen import backends

    backends.prepare()
    from test_te_checkpoints import ranks

    ranks(Path(sys.argv[1]))
