"""From encoded bytes to a batch on the device.

Start with `readers`, which say what is read for a plan of batches. `decode` and `device_decode` decode, after
`image_header` has looked at an image's size; `loader_processes` does so in processes, which get their work by
`sending` and write into shared `buffers`, and whose end `lost_loaders` names; `prefetch` copies batches to the device
while it works.
"""
