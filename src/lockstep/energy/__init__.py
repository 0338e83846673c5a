"""The energy that a host's CPUs and GPUs use, as its hardware counts it. Imports nothing else of Lockstep, no torch.

- `counters`: finds the counters that can be read, and names the others with the reason.
- `meter`: adds up what they count, and reads how busy the GPUs are.
"""
