"""The GPU suite: checks Lockstep's correctness on a GPU and measures its speed.

    python benchmarks/gpu list                    # the parts, with their minutes and what needs CUDA
    benchmarks/gpu/stage --cifar10 FILE.zip       # with a network: gpu-stage/, 45 MB; FILE.zip: train/CLASS, test/CLASS
    python benchmarks/gpu check+mnist gpu-stage/data --minutes 8             # on the GPU
    python benchmarks/gpu speed --minutes 8                                  # on the GPU
    python benchmarks/gpu cifar10 gpu-stage/data --minutes 9.4               # on the GPU

Parts: `check` (correctness), `speed` and `peers` need no data, `mnist` and `cifar10` a folder; `all` runs these three,
and mnist and cifar10 if their data is found; `jpeg` measures a folder of photographs. CIFAR-10 is the original files or
images in train/ and test/; records say which. For `peers`, copy airbench94_muon.py into the folder.

The suite stops after --minutes, a part after 9 minutes, and both report the steps that they left out. Each step is a
separate process, so a failure does not stop the others. The exit code is 1 if a correctness check failed. Results are
printed and appended to benchmarks/records/gpu_*.jsonl, or to DIR/records with --out DIR.

It needs torch, torchvision and numpy. Other packages come from gpu-stage/site if it exists, else from the image.
Use --device cpu to test the suite itself, at sizes too small to measure speed, or simgpu for the simulated GPU of the
tests, which needs a C++ compiler. Lines that need CUDA say so.
"""
