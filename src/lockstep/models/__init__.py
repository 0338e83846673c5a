"""Networks, and the neural network code that several packages use.

- `registry`: builds networks by name. `zoo_small` and `zoo_large` hold them; those of pytorch-cifar
  (https://github.com/kuangliu/pytorch-cifar) use its module names, so that its checkpoints load strictly.
- `blocks`: what they are made of.
- `pretrained`: loads published and own weights into a network; `saved_weights` reads the files.
- `global_batch_norm`: batch norm over all workers. `optimizer_state`: loads an optimizer's state as it was saved.
- `trial_forward`: checks that a model accepts inputs of a given form and number. `compiler`: imports what compiling one
  needs, for the preloaded process. `buffers`: saves a module's buffers and restores them. `nested`: functions of nested
  tensors.
"""
