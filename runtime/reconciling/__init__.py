"""Decides how many workers each revision of this node has, and makes and ends its processes. Start reading at `reconciler.py`.

    Reconciler          compares each revision's row with its workers, and acts; has the only timer that decides
      RevisionWorkers   observes one revision, asks `scaling` for its row of the desired state, and carries it out
        ProcessEvents   handles the events of its processes, and recovers the calls of workers that have ended
        Demand          measures the load of a revision
        Pool            starts, parks, wakes and ends its workers
          ZygoteSupervisor  has the zygote that workers are forked from, and the standby
      GpuPlaces         books the memory of the node's GPUs
      Function          whether it may run; shared by its revisions, with the keep-alive plan, the budget and the signals

Decisions are pure functions of `scaling`. This room must not know HTTP, jobs or what is deployed.
"""
