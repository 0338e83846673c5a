"""Step 7: print each worker's rank, local rank and cross rank.

lockstep run -np 2 -- python examples/tutorial/07_where_am_i.py
"""

import horovod.torch as hvd


def main() -> None:
    hvd.init()
    here = f"rank {hvd.rank()} of {hvd.size()}: local rank {hvd.local_rank()} of {hvd.local_size()}"
    lines = hvd.allgather_object(f"{here}, cross rank {hvd.cross_rank()} of {hvd.cross_size()}")
    if hvd.rank() == 0:
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
