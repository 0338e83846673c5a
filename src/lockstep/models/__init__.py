"""Networks by name; `registry.py` finds them."""
