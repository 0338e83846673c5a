"""From encoded bytes to a batch on the device. Start with `readers`.

| module | contents |
|---|---|
| `readers` | readers, which turn lists of sample numbers into batches |
| `loader_processes` | loading in processes |
| `decode`, `device_decode` | reading headers, and decoding on CPU and GPU |
"""
