"""DistributedOptimizer, an instance of the user's own optimizer class.

Start with `distributed`, which chooses: `gradient_optimizer` averages gradients, in the buckets that
`gradient_reducer` plans and reduces while backward still runs; `adasum_optimizer` combines steps. `wrapper` is what
both share.
"""
