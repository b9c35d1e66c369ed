"""The probe: measures a few steps of an unchanged Megatron training, then takes itself out.

It is carried to the machines of a run as a folder of its own (``hapmoe_probe`` beside
``sitecustomize.py``), where nothing else of hapmoe is installed: only the standard library and the
torch and Megatron of the trained program are used, and Python 3.10 will do. The environment asks for it:

    PYTHONPATH           the folder with sitecustomize.py, in front
    HAPMOE_PROBE         folder for ``rank<r>.jsonl``; without it nothing happens
    HAPMOE_PROBE_STEPS   training steps to measure (5)
    HAPMOE_PROBE_STOP=1  end the training behind them

What the lines hold is in docs/profile.md. While it measures it has hooks where Megatron-Core 0.12 to
main (2026-08) kept the same names: the schedules' forward_step and backward_step and the three
forward_backward functions, ``TopKRouter.forward``, the ``step`` of Megatron's optimizers, and the
functions of torch.distributed.
"""
