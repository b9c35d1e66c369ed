"""Kernels and collectives measured alone, with torch and nothing else: no script, no Megatron.

``shapes`` and ``spread`` need no torch; ``machine``, ``compute`` and ``collectives`` run beside it.
"""
