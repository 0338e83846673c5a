"""From encoded bytes to a batch on the device. Start with `readers`.

| module | contents |
|---|---|
| `readers` | readers, which turn lists of sample numbers into batches |
| `loader_processes` | loading in processes |
| `lost_loaders` | errors of loader processes that exit; without Pillow |
| `buffers` | reused and shared memory |
| `decode`, `device_decode` | reading headers, and decoding on CPU and GPU |
| `prefetch` | preparing the next batch during a step |
"""
