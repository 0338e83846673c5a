"""Modules of networks that more than one package needs.

`global_batch_norm` is batch norm over all workers, for `hvd` and `train`; `trial_forward` a pass of one blank image, by
which models and data find out what fits. Imports errors alone.
"""
