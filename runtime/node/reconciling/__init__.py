"""Decides how many workers each revision of this node has, and starts and ends the revisions' processes.

Start reading at `reconciler.py`.

    Reconciler          compares each revision's row with its workers, and acts; has the only timer for these decisions
      RevisionWorkers   observes one revision, asks `scaling` for the revision's row, and carries the row out
        ProcessEvents   handles the events of the revision's processes, and recovers the calls of ended workers
        Demand          measures the load of the revision
        Pool            starts, parks, wakes and ends the revision's workers
          ZygoteSupervisor  keeps the zygote, from which workers are forked, and the standby
          HeldWeights       keeps the fetched weights on this node while the revision has workers
      GpuPlaces         books the memory of the node's GPUs
      Function          tells whether a function may run; its revisions share its keep-alive plan, budget and signals

The decisions are pure functions in `scaling`. This room must not know about HTTP, jobs or deployments.
"""
