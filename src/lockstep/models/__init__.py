"""Networks, one family per file; `registry.py` builds them by name.

Families that pytorch-cifar also has (https://github.com/kuangliu/pytorch-cifar) use its module names, so that
`load_state_dict` loads its checkpoints strictly. `docs/reference/models.md` has the table.
"""
