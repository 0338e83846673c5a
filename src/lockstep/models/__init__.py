"""Networks by name; `registry.py` finds them.

Files hold one family each. In the families that pytorch-cifar has too (https://github.com/kuangliu/pytorch-cifar), the
modules bear its names, because that is what the checkpoint files people have are written in: such a file's weights load
with `load_state_dict`, strictly. `docs/reference/models.md` has the table.
"""
