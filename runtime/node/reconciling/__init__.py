"""Decides how many workers each revision of this node has, and starts and ends the revisions' processes.

Start reading at `reconciler.py`.

    Reconciler          compares each revision's row with its workers, and acts; has the only timer for these decisions
      RevisionWorkers   the life of one revision: it is proven, goes live, is warmed, and retires
        ObservedRevision  observes the revision, and asks `scaling` for its row; Demand measures its load
        CarryOut        carries out the row; nothing else starts and ends processes, or drops weights
        Bar             refuses the calls of a revision that may have no worker
        CallReports, ProcessEvents  pass on the events of its calls and of its processes, and have the reconciler look
        Pool            starts, parks, wakes and ends the revision's workers for CarryOut
          ZygoteSupervisor  keeps the zygote, from which workers are forked
          Standby           keeps the child of the zygote that becomes the next worker
          HeldWeights       keeps the fetched weights on this node while the revision has workers
      GpuBookings         books the memory of the node's GPUs
      Function          knows whether a function may run; its revisions share its keep-alive plan, budget and signals

The decisions are pure functions in `scaling`. This room must not know about HTTP, jobs or deployments.
"""
